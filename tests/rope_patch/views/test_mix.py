"""A mix of views: each document is read as under the one view that it draws, and as if that stood alone."""

import pytest
import torch
from support.views import Case, behind_skip

from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import locate_documents
from rope_patch.views import Compose, EndPrompt, LongRecipe, Mix, PosAug, PoSE, Skip, Standard
from rope_patch.views.laws import Step, Uniform


def _mixed(t, n, drawn):
    assert drawn["taken_0"] + drawn["taken_1"].int() + drawn["taken_2"] == 1
    if drawn["taken_0"]:
        return t
    return behind_skip(t, drawn["1.split"], drawn["1.skip"]) if drawn["taken_1"] else drawn["2.alpha"] * t


CASES = {
    "mix": Case(Mix([Standard(), Skip(skip=Uniform(1, 90)), PosAug(Uniform(2, 8))]), _mixed),
    "mix-endprompt": Case(
        Mix([EndPrompt(target=200, cue_tokens=4), Skip(split=4, skip=23)], [0.4, 0.6]),
        lambda t, n, drawn: behind_skip(t, n - 4, 200 - n) if drawn["taken_0"] else behind_skip(t, 4, 23),
    ),
}


PARTS = {
    "pose": PoSE(target=300, chunks=4),
    "endprompt": EndPrompt(target=300, cue_tokens=[[5], [5, 6]]),
    "skip": Skip(skip=Uniform(1, 90)),
    "posaug": PosAug(),
    "posaug-micro-batch": PosAug(granularity="micro-batch"),
    "longrecipe": LongRecipe(target=300, sentence_ends=[7]),
    "compose": Compose([Skip(), PosAug(granularity="sample")]),
}
LENGTHS = [9, 2, 14, 1, 7, 20, 11, 5] * 3


def drawn(view, packed, step=0, stream=0):
    """t, documents, and what is drawn for documents of `LENGTHS` that end with a cue."""
    texts = [[3 + i % 5 for i in range(n - 1)] + [5 + (n % 3 == 0)] for n in LENGTHS]
    if packed:
        ids = torch.tensor([sum(texts, [])])
        t = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        documents = locate_documents(1, ids.shape[1], ids.device, t, None)
    else:
        ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        t = torch.arange(max(LENGTHS)).masked_fill(~mask, -1)
        documents = locate_documents(*ids.shape, ids.device, None, mask)
    key = DrawKey(7, step, documents.ordinal, stream=stream)
    return t, documents, view.draw_for(ids, t, documents, key)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("part", PARTS)
def test_each_document_has_the_indices_of_its_view_alone(part, packed):
    views = [Standard(), PARTS[part]]
    mix = Mix(views)
    t, documents, parameters = drawn(mix, packed)
    index, first = mix.rope_index(t, parameters), mix.affected_from(t, documents, parameters)
    real = t >= 0
    for i, view in enumerate(views):
        taken = parameters[f"taken_{i}"]
        assert 3 < int(documents.ordinal[taken].unique().numel()) < len(LENGTHS) - 3, "some of each"
        _, _, alone = drawn(view, packed, stream=DrawKey(0, 0, None).substream(i).stream)
        here = taken.expand_as(index) & real
        assert torch.equal(index[here], view.rope_index(t, alone).expand_as(index)[here].to(index.dtype))
        expected = view.affected_from(t, documents, alone)
        assert torch.equal(first[taken], expected[taken])


def test_shares_say_how_often_each_view_is_taken_whatever_the_views_draw():
    shares, n = (0.1, 0.6, 0.3), 4000
    mix = Mix([Standard(), Skip(skip=Uniform(1, 2)), Skip()], shares)
    key = DrawKey(3, 0, torch.arange(n)[:, None])
    parameters = mix.draw(torch.full((n, 1), 12), key)
    taken = torch.stack([parameters[f"taken_{i}"] for i in range(3)])
    assert torch.equal(taken.sum(0), torch.ones(n, 1, dtype=torch.int64)), "one view each"
    for of_view, share in zip(taken, shares, strict=True):
        assert abs(of_view.double().mean() - share) < 4.5 * (share * (1 - share) / n) ** 0.5
    # of two equally likely skips, the same share among those who take the view and among the others
    ones = (parameters["1.skip"] == 1).double()
    assert abs(ones[taken[1]].mean() - ones[~taken[1]].mean()) < 4.5 * (0.25 / 1600 + 0.25 / 2400) ** 0.5
    step = mix.draw(torch.full((n, 1), 12), DrawKey(3, 1, torch.arange(n)[:, None]))
    assert not torch.equal(step["taken_1"], parameters["taken_1"]), "drawn anew in each step"


def test_what_a_mix_knows_of_its_views():
    mix = Mix([Standard(), Skip(skip=Uniform(1, 50)), PosAug(Step(Uniform(0.125, 8)))])
    assert mix.follows_progress and not Mix([Standard(), Skip()]).follows_progress
    assert mix.reach(10) == 72 and Mix([Standard(), Skip(skip=Uniform(1, 50))]).reach(10) == 59
    assert not (mix.layerwise or mix.rescales) and mix.perturbs
    views = ["standard", {"view": "skip", "skip": {"law": "uniform", "high": 50}}, mix.views[2]]
    assert mix.shares == (1 / 3,) * 3 and mix == Mix(views)
    assert Mix(["standard", "skip"], [0.5, 0.5]) == Mix([Standard(), Skip()])
    t, length = torch.tensor([[1, 6]]), torch.tensor([[12]])
    expected = 0.25 * Skip().affected_share(t, length)
    assert torch.equal(Mix(["standard", "skip"], [0.75, 0.25]).affected_share(t, length), expected)
