"""Accuracy by the position of the answer."""

from itertools import product

import pytest
from support.retrieval import TEXT, TOKENIZER, lookup

from rope_patch.eval import AnswerPositionAccuracy, accuracy_by_answer_position, niah

DEPTHS = [0.05, 0.25, 0.4, 0.65, 0.8, 0.95]


def test_a_model_that_reads_the_first_half_only_shows_where_it_stops():
    first_half = lookup(lambda text, values: [v for v in values if text.index(v) < len(text) / 2])
    grid = niah(first_half, TOKENIZER, TEXT, [1200], depths=DEPTHS, trials=1, progress=False)
    assert grid.accuracy == [[1, 1, 1, 0, 0, 0]]
    (curve,) = accuracy_by_answer_position(grid, n_bins=2).curves
    assert curve["accuracy"] == [1, 0] and curve["count"] == [3, 3]
    assert curve["mid_third_gap"] == pytest.approx(0)


def test_kinds_and_lengths_have_curves_of_their_own():
    """A model that finds answers in the first half of short prompts and in the second half of long ones."""

    def finds(text, values):
        return [v for v in values if (text.index(v) < len(text) / 2) == (len(text) < 800)]

    grids = [
        niah(
            lookup(finds),
            TOKENIZER,
            TEXT,
            [700, 1000],
            kind=kind,
            depths=[0.05, 0.15, 0.85, 0.95],
            trials=1,
            progress=False,
        )
        for kind in ("single", "multikey")
    ]
    found = accuracy_by_answer_position(grids, n_bins=2)
    assert {(c["kind"], c["length"]): c["accuracy"] for c in found.curves} == {
        (kind, length): [1, 0] if length == 700 else [0, 1]
        for kind, length in product(("single", "multikey"), (700, 1000))
    }
    assert [row["accuracy"] for row in found.table()] == 2 * [1, 0, 0, 1]
    panels = AnswerPositionAccuracy.figure({"m": found}).axes
    assert [line.get_ydata().tolist() for axes in panels for line in axes.get_lines()] == 2 * [[1, 0], [0, 1]]
    said = found.reading(label="m")
    assert [sentence.partition(":")[0] for sentence in said[:2]] == ["m, single", "m, multikey"]
    most = max(n for curve in found.curves for n in curve["count"])
    assert said[-1].startswith(f"Each point is the mean of at most {most} prompts.") and "if it finds none" in said[-1]
