"""A gap at one place of each document: formula, draws, reach."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from support.views import Case, L, behind_skip, built, drawn, first_changed, index, integer_laws, key, maybe

from rope_patch.views import Linear, Skip, Step, Uniform

CASES = {
    "skip": Case(Skip(split=4, skip=23), lambda t, n, drawn: behind_skip(t, 4, 23)),
    "skip-drawn": Case(Skip(skip=Uniform(1, 90)), lambda t, n, drawn: behind_skip(t, drawn["split"], drawn["skip"])),
}


STRATEGIES = {
    "skip": lambda farthest: built(
        Skip, split=maybe(st.integers(1, 16) | integer_laws), skip=maybe(st.integers(-9, -1) | integer_laws)
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
    assert drawn(Skip(skip=Uniform(1, 3)))["skip"].max() == 3


def test_a_step_curriculum_leaves_documents_as_they_are_before():
    view, length = Skip(skip=Step(Uniform(1, 40))), torch.full((50, 1), L)
    early, late = (replace(key(50), progress=torch.tensor(p, dtype=torch.float64)) for p in (0.1, 0.9))
    assert torch.equal(first_changed(view, view.draw(length, early), length), length)
    parameters = view.draw(length, late)
    assert torch.equal(first_changed(view, parameters, length) % L, parameters["split"])


def test_how_far_skips_reach():
    view = Skip(skip=Linear(Uniform(1, 10), start=5000))
    assert view.reach(21) == 5020 and view.largest_skip(torch.tensor([21])).tolist() == [5000]
    assert Skip(skip=-3).reach(21) == 20 and Skip(skip=3).largest_skip(torch.tensor([21])) is None
