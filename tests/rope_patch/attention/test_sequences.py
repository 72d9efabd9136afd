"""Pieces of a flattened batch: what stands between documents is a piece too."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_patch.attention.sequences import with_gaps


def test_gaps_are_pieces_in_their_order():
    assert with_gaps({7: 2, 1: 3}, 12) == {0: 1, 1: 3, 4: 3, 7: 2, 9: 3}
    assert with_gaps({}, 4) == {0: 4} and with_gaps({0: 4}, 4) == {0: 4}
    assert with_gaps({0: 2, 2: 0, 3: 1}, 4) == {0: 2, 2: 1, 3: 1}, "a piece of nothing is none"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6), st.integers(0, 3))
def test_pieces_are_all_of_the_tokens(parts, rest):
    sizes, place = {}, 0
    for gap, size in parts:
        place += gap
        if size:
            sizes[place] = size
        place += size
    whole = with_gaps(sizes, place + rest)
    assert sizes.items() <= whole.items() and 0 not in whole.values()
    places = torch.tensor([0, *whole.values()]).cumsum(0).tolist()
    assert places[:-1] == list(whole) and places[-1] == place + rest
