"""Positions stretched by a factor for each document."""

from hypothesis import strategies as st
from support.views import Case, L, built, drawn, factor_laws, index, maybe

from rope_patch.views import Dilation, Uniform

CASES = {
    "dilation": Case(Dilation(Uniform(1.5, 2)), lambda t, n, drawn: drawn["factor"] * t),
}


STRATEGIES = {"dilation": lambda farthest: built(Dilation, factor=maybe(st.just(1.5) | factor_laws))}


def test_dilation_follows_its_formula():
    assert index(Dilation(1.5)) == [1.5 * i for i in range(L)]


def test_dilation_draws_one_factor_a_document():
    factor = drawn(Dilation())["factor"]
    assert factor.shape == (2000, 1)
    assert 0.5 <= factor.min() < 0.52 and 1.98 < factor.max() <= 2
