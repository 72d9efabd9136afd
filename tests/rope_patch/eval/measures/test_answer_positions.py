"""Accuracy by the position of the answer, from grids with known places and scores."""

from rope_patch.eval import AnswerPositionAccuracy, RetrievalGrid, accuracy_by_answer_position

PLACES = [0.1, 0.3, 0.4, 0.6, 0.8, 0.95]


def grid(kind, finds):
    """Six prompts of each length: length -> whether the model finds an answer in the first or in the second half."""
    scores = [float((place < 0.5) == (half == "first")) for half in finds.values() for place in PLACES]
    accuracy = [scores[6 * k : 6 * k + 6] for k in range(len(finds))]
    return RetrievalGrid(kind, list(finds), PLACES, accuracy, 1, PLACES * len(finds), scores)


def test_a_model_that_reads_the_first_half_only_shows_where_it_stops():
    (curve,) = accuracy_by_answer_position(grid("single", {2000: "first"}), n_bins=2).curves
    assert curve["accuracy"] == [1, 0] and curve["count"] == [3, 3]
    assert curve["mid_third_gap"] == 0, "one of two in the middle third, two of four outside"
    (curve,) = accuracy_by_answer_position(grid("single", {2000: "first"}), n_bins=10).curves
    assert curve["accuracy"] == [None, 1, None, 1, 1, None, 0, None, 0, 0]


def test_kinds_and_lengths_have_curves_of_their_own():
    grids = [grid(kind, {1000: "first", 2000: "second"}) for kind in ("single", "multikey")]
    found = accuracy_by_answer_position(grids, n_bins=2)
    assert [(c["kind"], c["length"], c["accuracy"]) for c in found.curves] == [
        (kind, length, accuracy)
        for kind in ("single", "multikey")
        for length, accuracy in ((1000, [1, 0]), (2000, [0, 1]))
    ]
    assert [row["accuracy"] for row in found.table()] == 2 * [1, 0, 0, 1]
    panels = AnswerPositionAccuracy.figure({"m": found}).axes
    assert [line.get_ydata().tolist() for axes in panels for line in axes.get_lines()] == 2 * [[1, 0], [0, 1]]
    sentences = found.reading(label="m")
    assert [sentence.partition(":")[0] for sentence in sentences[:2]] == ["m, single", "m, multikey"]
    assert sentences[-1].startswith("Each point is the mean of at most 3 prompts.") and "finds none" in sentences[-1]
