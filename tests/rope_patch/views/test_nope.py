"""No positions."""

from hypothesis import strategies as st
from support.views import Case, L, index

from rope_patch.views import NoPE

CASES = {
    "nope": Case(NoPE(), lambda t, n, drawn: 0 * t),
}


STRATEGIES = {"nope": lambda farthest: st.just(NoPE())}


def test_nope_is_zero_everywhere():
    assert index(NoPE()) == [0] * L
