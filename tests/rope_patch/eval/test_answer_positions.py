"""Accuracy by the position of the answer."""

import pytest
from support.retrieval import TEXT, TOKENIZER, lookup

from rope_patch.eval import accuracy_by_answer_position, niah


def test_a_model_that_reads_the_first_half_only_shows_where_it_stops():
    first_half = lookup(lambda text, values: [v for v in values if text.index(v) < len(text) / 2])
    depths = [0.05, 0.25, 0.4, 0.65, 0.8, 0.95]
    grid = niah(first_half, TOKENIZER, TEXT, [2000], depths=depths, trials=3, progress=False)
    assert grid.accuracy == [[1, 1, 1, 0, 0, 0]]
    by_place = accuracy_by_answer_position(grid, n_bins=2)
    assert by_place.accuracy == [1, 0] and by_place.spread == 1 and by_place.count == [9, 9]
    assert by_place.mid_third_gap == pytest.approx(0)
