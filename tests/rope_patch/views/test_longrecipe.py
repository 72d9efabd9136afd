"""Gaps between sentences: against a loop over documents, however they are batched, and against a decoder in float64."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.batches import batch, documents_of
from support.tiny import VOCAB, tiny, tokens
from support.views import PAD, Case, built

from rope_patch import patch_model, rope_view
from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import locate_documents
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import REQUEST, SelfDistiller, ViewConsistency, ViewRequest
from rope_patch.views import Compose, LongRecipe, Skip, Uniform


def _by_sentence(t, n, drawn):
    return t + drawn["offset"][t.long().clamp(max=n - 1)]


CASES = {
    "longrecipe": Case(LongRecipe(target=200, sentence_ends=range(30)), _by_sentence),
}

STRATEGIES = {
    "longrecipe": lambda farthest: built(
        LongRecipe, target=farthest, sentence_ends=st.lists(st.integers(4, 6)).map(lambda ends: [PAD, *ends])
    )
}


ENDS = [i for i in range(3, VOCAB) if i % 3 == 0]
VIEW = LongRecipe(target=400, sentence_ends=ENDS)


def drawn(data, view=VIEW, step=2):
    """Parameters, documents and t of a batch."""
    ids = data["input_ids"]
    positions = data.get("position_ids")
    documents = locate_documents(*ids.shape, ids.device, positions, data.get("attention_mask"))
    t = (torch.arange(ids.shape[1])[None] if positions is None else positions) - documents.start
    key = DrawKey(7, torch.tensor(step), documents.ordinal)
    return view.draw_for(ids, t, documents, key), documents, t


def by_hand(ids, number, view=VIEW, step=2):
    """r(t) of one document, token by token."""
    n, key = len(ids), DrawKey(7, torch.tensor(step), torch.tensor([[number]]))
    starts = [t for t in range(1, n) if ids[t - 1] in view.sentence_ends]
    gaps = sorted(key.integers(0, view.target - n, slot=64 + t).item() for t in [0, *starts])[1:]
    c = key.integers(1, (n + 1) // 2, slot=0).item()
    index, offset = [], 0
    for t in range(n):
        if t in starts:
            offset = gaps[starts.index(t)]
        index.append(t + (offset if t >= c else 0))
    return index, c, starts


@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
def test_it_is_the_loop_however_documents_are_batched(kind):
    torch.manual_seed(4)
    data, moved = batch(kind), 0
    parameters, documents, t = drawn(data)
    index = VIEW.rope_index(t, parameters).expand(data["input_ids"].shape)
    first = VIEW.affected_from(t, documents, parameters).expand(data["input_ids"].shape)
    for number, (row, start, length) in enumerate(documents_of(data)):
        expected, c, starts = by_hand(data["input_ids"][row, start : start + length].tolist(), number)
        assert index[row, start : start + length].tolist() == expected
        jumps = [i for i in range(1, length) if expected[i] - expected[i - 1] != 1]
        assert all(expected[i] > expected[i - 1] for i in range(1, length)) and expected[-1] < 400
        assert set(jumps) <= {c, *starts} and first[row, start] == (jumps[0] if jumps else length)
        moved += len(jumps)
    assert moved > 2


def test_gaps_reach_all_of_the_window():
    ids = tokens(1, 24).expand(400, -1)
    parameters, _, _ = drawn({"input_ids": ids})
    last = parameters["offset"][:, -1]
    assert last.min() < 250 and last.max() > 365 and last.max() <= 400 - 24


def test_gaps_are_distributed_as_the_authors_draw_them():
    """m of the L - n + m places without repetition, of which the first sentence leaves its own for place 0."""
    n, target, every, draws = 30, 20_030, 5, 4000
    m, rng = n // every, np.random.default_rng(0)
    places = np.sort(np.stack([rng.choice(target - n + m, m, replace=False) for _ in range(draws)]), axis=1)
    expected = (places - np.arange(m))[:, 1:]  # free places before each sentence but the first
    ids = torch.where(torch.arange(n) % every == every - 1, 3, 4).expand(draws, -1)
    parameters, _, _ = drawn({"input_ids": ids}, LongRecipe(target=target, sentence_ends=[3]))
    actual = parameters["offset"][:, every::every].numpy()
    limits = np.arange(0, target, 50)
    for j in range(2, m - 1):  # behind the half that may stay where it is
        below, wanted_below = ((gaps[:, j, None] <= limits).mean(0) for gaps in (actual, expected))
        distance = np.abs(below - wanted_below).max()
        assert distance < 1.7 * (2 / draws) ** 0.5, f"gap {j + 1}: Kolmogorov-Smirnov distance {distance:.3f}"


def test_some_layers_alone_may_have_the_gaps():
    """In none of them it is the plain model, in all of them the view."""
    model, ids, logits = tiny(), tokens(2, 20), {}
    for layers in ((0, 1, 2), (2,)):
        patch_model(model, "per-layer", view=VIEW, layers=layers, when="always", seed=7)
        logits[layers] = model(ids).logits
    with rope_view(model, VIEW, seed=7):
        torch.testing.assert_close(logits[0, 1, 2], model(ids).logits)
    with rope_view(model, "standard"):
        plain = model(ids).logits
    assert not torch.allclose(logits[2,], plain, atol=1e-3) and not torch.allclose(
        logits[2,], logits[0, 1, 2], atol=1e-3
    )


def test_decoding_goes_on_behind_the_last_sentence():
    model, ids = tiny(), tokens(2, 20)
    with rope_view(model, VIEW, seed=7), torch.no_grad():
        filled = model(ids, use_cache=True)
        token = tokens(2, 1)
        one = model(token, past_key_values=filled.past_key_values, use_cache=True).logits[:, -1]
    index = torch.tensor([by_hand(row.tolist(), i, step=0)[0] for i, row in enumerate(ids)])
    with rope_view(model, index=torch.cat([index, index[:, -1:] + 1], 1)), torch.no_grad():
        expected = model(torch.cat([ids, token], 1)).logits[:, -1]
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("view", [VIEW, Compose([VIEW, Skip(skip=Uniform(1, 90))])], ids=["alone", "composed"])
@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
def test_self_distillation_in_one_pass_is_that_in_two(kind, view):
    data, results = batch(kind), []
    for one_pass in (True, False):
        model = patch_model(tiny("qwen3", dtype=torch.float64), view).train()
        distiller = SelfDistiller(model, ViewConsistency(reduction="token"), one_pass=one_pass)
        distiller.view.clock.set(3, 0)
        labelled = Labelled.of(data)
        suffix = labelled.suffix_total(distiller.changes.next_first(labelled))
        request = ViewRequest(labelled, labelled.n_labels, suffix)
        inputs = {name: value for name, value in data.items() if name != "labels"}
        with distiller.active():
            model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
            request.result.loss.backward()
        assert request.result.rows.kl.gt(0).any()
        results.append((request.result.loss.detach(), *(p.grad for p in model.parameters())))
    for first, second in zip(*results, strict=True):
        assert (first - second).abs().max() <= 2e-6 * second.abs().max() + 1e-9


def test_tokens_are_needed():
    model = tiny()
    with pytest.raises(ValueError, match="reads tokens: call the model with input_ids"), rope_view(model, VIEW):
        model(inputs_embeds=torch.zeros(1, 5, 32))
