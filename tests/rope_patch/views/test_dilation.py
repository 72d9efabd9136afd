"""Positions stretched by a factor for each document."""

import pytest
from support.views import Case, L, built, drawn, index, maybe, positive

from rope_patch.views import Dilation

CASES = {
    "dilation": Case(Dilation(low=1.5), lambda t, n, drawn: drawn["factor"] * t),
}


STRATEGIES = {"dilation": lambda farthest: built(Dilation, low=maybe(positive), high=maybe(positive))}


def test_dilation_follows_its_formula():
    assert index(Dilation(low=1.5, high=1.5)) == [1.5 * i for i in range(L)]


def test_dilation_draws_one_factor_a_document():
    factor = drawn(Dilation())["factor"]
    assert factor.shape == (2000, 1)
    assert 0.5 <= factor.min() < 0.52 and 1.98 < factor.max() <= 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dilation(low=0), "view 'dilation': low must be a finite number above 0, .* got 0."),
        (lambda: Dilation(low=1, high=1), "low=1 and high=1 stretch nothing"),
        (lambda: Dilation(low="a"), "low must be a finite number above 0, .*got 'a'"),
        (lambda: Dilation(low=1e-320), "low must be a finite number above 0, from 2\\*\\*-24"),
    ],
)
def test_what_dilation_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
