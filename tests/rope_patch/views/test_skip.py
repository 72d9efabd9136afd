"""A gap at one place of each document: formula, draws, reach."""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from support.batches import batch, documents_of
from support.tiny import tokens
from support.views import PAD, Case, L, behind_skip, built, drawn, first_changed, index, integer_laws, key, maybe

from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import locate_documents
from rope_patch.views import Linear, Skip, Step, Uniform

CASES = {
    "skip": Case(Skip(split=4, skip=23), lambda t, n, drawn: behind_skip(t, 4, 23)),
    "skip-drawn": Case(Skip(skip=Uniform(1, 90)), lambda t, n, drawn: behind_skip(t, drawn["split"], drawn["skip"])),
    "skip-borders": Case(
        Skip(split=[[i] for i in range(40)]), lambda t, n, drawn: behind_skip(t, drawn["split"], drawn["skip"])
    ),
}


borders = st.sampled_from([[[PAD]], [[PAD], [5]], [[PAD, PAD], [4, 5]], [[5, PAD], [PAD]]])
STRATEGIES = {
    "skip": lambda farthest: built(
        Skip, split=maybe(st.integers(1, 16) | integer_laws | borders), skip=maybe(st.integers(-9, -1) | integer_laws)
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


ENDS = [[3], [9, 12], *([i] for i in range(30, 60))]


def drawn_for(data, view, step=2):
    """Parameters of a batch, as of its own numbers of documents."""
    ids, positions = data["input_ids"], data.get("position_ids")
    documents = locate_documents(*ids.shape, ids.device, positions, data.get("attention_mask"))
    t = (torch.arange(ids.shape[1])[None] if positions is None else positions) - documents.start
    if "attention_mask" in data:
        t = t.masked_fill(data["attention_mask"] == 0, -1)
    return view.draw_for(ids, t, documents, DrawKey(7, torch.tensor(step), documents.ordinal))


def places_behind(ids, ends):
    """Tokens that follow one of `ends`, by looking at each."""
    return [t for t in range(1, len(ids)) if any(t >= len(end) and ids[t - len(end) : t] == end for end in ends)]


@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
def test_a_split_at_borders_is_the_loop_however_documents_are_batched(kind):
    torch.manual_seed(4)
    data, split_somewhere = batch(kind), 0
    data["input_ids"][0, 4:6] = torch.tensor([9, 12])
    for step in range(8):
        parameters = drawn_for(data, Skip(split=ENDS), step)
        split, skip = (parameters[name].expand(data["input_ids"].shape) for name in ("split", "skip"))
        for number, (row, start, length) in enumerate(documents_of(data)):
            places = places_behind(data["input_ids"][row, start : start + length].tolist(), ENDS)
            own = DrawKey(7, torch.tensor(step), torch.tensor([[number]]))
            expected = places[own.integers(1, len(places), slot=0).item() - 1] if places else length
            assert split[row, start : start + length].tolist() == [expected] * length
            assert skip[row, start].item() == own.integers(1, length, slot=1).item()
            split_somewhere += bool(places)
    assert split_somewhere > 8


def test_all_borders_of_a_document_are_equally_likely():
    row = tokens(1, 24)[0] % 5 + 60  # no border but these
    row[[2, 7, 15, 23]] = 3  # the last one ends the document, so that nothing follows it
    row[10:12] = torch.tensor([9, 12])
    samples = 4000
    split = drawn_for({"input_ids": row.expand(samples, -1)}, Skip(split=ENDS))["split"].flatten()
    assert set(split.tolist()) == {3, 8, 12, 16}
    share = split.bincount(minlength=24)[[3, 8, 12, 16]] / samples
    assert (share - 0.25).abs().max() < 4.5 * (0.25 * 0.75 / samples) ** 0.5


def test_a_border_of_another_document_is_none():
    """A pair of tokens of which one ends a document and the other begins the next one."""
    data = {"input_ids": torch.tensor([[1, 9, 12, 1, 1]]), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    assert drawn_for(data, Skip(split=[[9, 12]]))["split"].tolist() == [[2, 2, 3, 3, 3]]
