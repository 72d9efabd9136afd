"""Documents that are turned: formula, draws, what is refused."""

import pytest
import torch
from hypothesis import strategies as st
from support.views import Case, L, built, drawn, index, maybe

from rope_patch.views import Cyclic, Skip


def _cyclic(t, n, drawn):
    return torch.where(t < n, (t + drawn["shift"]) % n, t + drawn["shift"] - n)


CASES = {
    "cyclic": Case(Cyclic(), _cyclic),
}


STRATEGIES = {"cyclic": lambda farthest: built(Cyclic, shift=maybe(st.integers(0, 16)))}


def test_cyclic_follows_its_formula():
    assert index(Cyclic(shift=4)) == [(i + 4) % L for i in range(L)]


def test_cyclic_draws_every_shift_of_the_document():
    assert set(drawn(Cyclic())["shift"].flatten().tolist()) == set(range(L))


def test_cyclic_is_the_skip_of_minus_length_up_to_a_constant():
    turned = torch.tensor(index(Cyclic(shift=4)))
    skipped = torch.tensor(index(Skip(split=L - 4, skip=-L)))
    assert (turned - skipped).unique().tolist() == [4]


def test_cyclic_goes_on_after_the_suffix_when_decoding():
    assert index(Cyclic(shift=4), t=torch.arange(L, L + 3)[None]) == [4, 5, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cyclic(shift=-2), "view 'cyclic': shift must be at least 0, got -2."),
        (lambda: Cyclic(shift=0), "shift=0 turns nothing"),
        (lambda: Cyclic(shift=L).check_length(L), "shift must be below the number of tokens in the sequence"),
    ],
)
def test_what_cyclic_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
