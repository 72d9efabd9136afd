"""True positions."""

from hypothesis import strategies as st
from support.views import Case, L, index

from rope_patch.views import Standard

CASES = {
    "standard": Case(Standard(), lambda t, n, drawn: t),
}


STRATEGIES = {"standard": lambda farthest: st.just(Standard())}


def test_standard_is_the_index_of_each_token():
    assert index(Standard()) == list(range(L))
