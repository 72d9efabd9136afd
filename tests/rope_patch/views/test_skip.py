"""A gap at one place of each document: formula, draws, what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from support.views import Case, L, behind_skip, built, drawn, first_changed, index, key, maybe

from rope_patch.views import Skip

CASES = {
    "skip": Case(Skip(split=4, skip=23), lambda t, n, drawn: behind_skip(t, 4, 23)),
    "skip-drawn": Case(Skip(max_skip=90), lambda t, n, drawn: behind_skip(t, drawn["split"], drawn["skip"])),
}


STRATEGIES = {
    "skip": lambda farthest: built(
        Skip,
        split=maybe(st.integers(0, 16)),
        skip=maybe(st.integers(-9, 9)),
        max_skip=maybe(st.integers(1, 30)),
        law=maybe(st.sampled_from(["uniform", "log-uniform"])),
        curriculum=maybe(st.sampled_from(["linear", "step"])),
        start=maybe(st.sampled_from([0, 1, 5, 60])),
        until=maybe(st.sampled_from([0.3, 0.7])),
    )
}


def test_skip_follows_its_formula():
    t = range(L)
    assert index(Skip(split=5, skip=100)) == [i if i < 5 else i + 100 for i in t]
    assert index(Skip(split=5, skip=-L)) == [i if i < 5 else i - L for i in t]


def test_skip_draws_the_split_in_the_document_and_the_skip_up_to_its_length():
    parameters = drawn(Skip())
    assert set(parameters["split"].flatten().tolist()) == set(range(L))
    assert set(parameters["skip"].flatten().tolist()) == set(range(1, L + 1))
    # independent draws: all combinations turn up
    pairs = torch.stack([parameters["split"], parameters["skip"]]).flatten(1).T.unique(dim=0)
    assert len(pairs) == L * L
    assert drawn(Skip(max_skip=3))["skip"].max() == 3


def test_log_uniform_skips_give_each_doubling_the_same_share():
    view, draws, largest = Skip(split=3, max_skip=63, law="log-uniform"), 60_000, 63
    y = view.draw(torch.full((draws, 1), L), key(draws))["skip"].flatten()
    assert y.min() == 1 and y.max() == largest
    share = torch.bincount(y, minlength=largest + 1)[1:].double() / draws
    k = torch.arange(1, largest + 1, dtype=torch.float64)
    assert (share - (1 + 1 / k).log() / math.log(largest + 1)).abs().max() < 0.006
    doublings = [share[2**i - 1 : 2 ** (i + 1) - 1].sum() for i in range(6)]  # 1, 2..3, 4..7, ..., 32..63
    torch.testing.assert_close(torch.stack(doublings), torch.full((6,), 1 / 6, dtype=torch.float64), rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("curriculum", "largest"),
    [("linear", {0.0: 4, 0.25: 13, 0.5: 22, 1.0: 40}), ("step", {0.0: 4, 0.49: 4, 0.5: 40, 1.0: 40})],
)
@pytest.mark.parametrize("law", ["uniform", "log-uniform"])
def test_the_range_of_skips_grows_with_training(law, curriculum, largest):
    view = Skip(max_skip=40, law=law, curriculum=curriculum, start=4)
    for progress, limit in largest.items():
        at = replace(key(3000), progress=torch.tensor(progress, dtype=torch.float64))
        y = view.draw(torch.full((3000, 1), L), at)["skip"]
        assert (y.min(), y.max()) == (1, limit)


def test_a_curriculum_may_start_with_true_positions():
    view = Skip(max_skip=40, curriculum="step")
    length = torch.full((50, 1), L)
    early, late = (replace(key(50), progress=torch.tensor(p, dtype=torch.float64)) for p in (0.1, 0.9))
    parameters = view.draw(length, early)
    assert not parameters["skip"].any() and torch.equal(first_changed(view, parameters, length), length)
    parameters = view.draw(length, late)
    assert torch.equal(first_changed(view, parameters, length) % L, parameters["split"])
    for wrong, message in (
        ({"skip": 5, "law": "log-uniform"}, "law and curriculum are of the draw that a fixed skip replaces"),
        ({"law": "normal"}, "law must be one of"),
        ({"curriculum": "step", "until": 1.5}, "until must be in"),
        ({"start": -1}, "start must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Skip(**wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Skip(split=-1), "view 'skip': split must be at least 0, got -1."),
        (lambda: Skip(split=1.5), "view 'skip': split must be an integer or None, got 1.5."),
        (lambda: Skip(skip=2**25), "skip must be in \\[-16777216, 16777216\\], got 33554432"),
        (lambda: Skip(max_skip=0), "max_skip must be at least 1, got 0."),
        (lambda: Skip(skip=3, max_skip=3), "give skip or max_skip, not both"),
        (lambda: Skip(split=0), "view 'skip': split must be at least 1 or None, got 0"),
        (lambda: Skip(skip=0), "skip=0 moves nothing"),
        (lambda: Skip(start=3), "start is read with a curriculum alone, got start=3: leave it out"),
        (lambda: Skip(curriculum="linear", until=0.5), "until is read with curriculum='step' alone"),
        (lambda: Skip(law="log-uniform", max_skip=1), "law='log-uniform' says nothing where max_skip=1"),
        (
            lambda: Skip(curriculum="step", start=8, max_skip=8),
            "goes from start=8 to an equal max_skip",
        ),
        (lambda: Skip(curriculum="step", until="half"), "until must be in \\(0, 1\\), got 'half'"),
        (lambda: Skip(split=True), "split must be an integer or None, got True"),
        (
            lambda: Skip(split=L).check_length(L),
            "split must be below the number of tokens in the sequence, got split=12",
        ),
        (lambda: Skip().check_length(2**24), "RoPE indices would reach 33554431"),
    ],
)
def test_what_skip_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_curriculum_that_comes_down_reaches_as_far_as_it_begins():
    view = Skip(max_skip=10, curriculum="linear", start=5000)
    assert view.reach(21) == 5020 and view.largest_skip(torch.tensor([21])).tolist() == [5000]
    with pytest.raises(ValueError, match="RoPE indices would reach 16777236"):
        Skip(max_skip=10, curriculum="linear", start=2**24).check_length(21)
    assert Skip(max_skip=10, curriculum="linear", start=2).reach(21) == 30
