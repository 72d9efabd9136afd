"""Documents that are turned: formula, draws."""

import torch
from hypothesis import strategies as st
from support.views import Case, L, built, drawn, index, integer_laws, maybe

from rope_patch.views import Cyclic, Skip


def _cyclic(t, n, drawn):
    return torch.where(t < n, (t + drawn["shift"]) % n, t + drawn["shift"] - n)


CASES = {
    "cyclic": Case(Cyclic(), _cyclic),
}


STRATEGIES = {"cyclic": lambda farthest: built(Cyclic, shift=maybe(st.integers(1, 16) | integer_laws))}


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
