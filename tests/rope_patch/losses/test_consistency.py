"""Rows of the KL that count by LongCE's weights, or by their size: against two plain passes and loops over tokens."""

import math

import pytest
import torch
from support.batches import batch, documents_of
from support.tiny import tiny

from rope_patch import native_rope, patch_model, rope_view
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import (
    REQUEST,
    CopiedTeacher,
    LongCE,
    SelfDistiller,
    StandardRequest,
    ViewConsistency,
    ViewRequest,
)
from rope_patch.losses.consistency import top_share
from rope_patch.views import Uniform

LONGCE = LongCE(short_context=5, stride=3, cap=1.5)
SPLIT, SKIP = 3, 30


def longce_weight(model, ids, i, full):
    """min(p_full / p_short, cap) of token i, 1 within the first; short windows begin at multiples of the stride."""
    if i < LONGCE.short_context:
        return 1.0
    start = (i - LONGCE.short_context) // LONGCE.stride * LONGCE.stride
    with torch.no_grad(), rope_view(model, "standard"):
        short = model(ids[None, start : i + 1], use_cache=False).logits[0].double().log_softmax(-1)
    return min((full[i - 1, ids[i]] - short[i - 1 - start, ids[i]]).exp().item(), LONGCE.cap)


def by_hand(model, data, consistency, native):
    """Loss with gradient, and the factor of each row by (row, query)."""
    ce = kl = 0.0
    n_labels, factors = 0, {}
    documents = list(documents_of(data))
    for row, begin, length in documents:
        ids = data["input_ids"][row, begin : begin + length]
        with rope_view(model, "standard"):
            standard = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
            with native_rope(model), torch.no_grad():
                target = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        t = torch.arange(length)
        with rope_view(model, index=torch.where(t >= SPLIT, t + SKIP, t)[None]):
            seen = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        q = target if native else standard.detach()
        first = 0 if native else SPLIT
        terms = {i: (seen[i].exp() * (seen[i] - q[i])).sum() for i in range(first, length - 1)}
        for i in range(1, length):
            ce = ce - standard[i - 1, ids[i]] - consistency.view_clm * seen[i - 1, ids[i]]
        n_labels += length - 1
        weight = dict.fromkeys(terms, 1.0)
        if consistency.kl_longce is not None:
            weight = {i: longce_weight(model, ids, i + 1, standard.detach()) for i in terms}
        if consistency.kl_top is not None:
            largest = sorted(terms, key=lambda i: -terms[i].item())[: math.ceil(consistency.kl_top * len(terms))]
            weight = {i: weight[i] * (i in largest) for i in terms}
        factors.update({(row, begin + i): weight[i] for i in terms})
        kl = kl + sum((weight[i] * terms[i] for i in terms), torch.zeros(())) / (length - first)
    return ce / n_labels + consistency.kl_weight * kl / len(documents), factors


WAYS = {
    "plain": {"view_clm": 0.3},
    "longce": {"kl_longce": LONGCE},
    "top": {"kl_top": 0.4},
    "both": {"kl_longce": LONGCE, "kl_top": 0.6},
}


@pytest.mark.parametrize(
    ("way", "kind", "passes", "native"),
    [
        ("plain", "left", "one", True),
        ("plain", "packed", "sequential", True),
        ("longce", "left", "one", False),
        ("longce", "packed", "two", True),
        ("longce", "plain", "sequential", False),
        ("top", "packed", "one", True),
        ("top", "left", "two", False),
        ("top", "packed", "sequential", True),
        ("both", "packed", "one", False),
        ("both", "left", "one", True),
        ("both", "left", "sequential", False),
        ("both", "packed", "sequential", True),
    ],
)
def test_the_kl_of_each_row_has_its_weight(way, kind, passes, native):
    torch.manual_seed(5)
    data = batch(kind)
    data["labels"] = data["input_ids"]
    if "attention_mask" in data:
        data["labels"] = data["labels"].masked_fill(data["attention_mask"] == 0, -100)
    model = patch_model(tiny("qwen3", dtype=torch.float64), "pi", factor=2.0)
    patch_model(model, "skip", split=SPLIT, skip=SKIP).train()
    consistency = ViewConsistency(kl_weight=0.8, **WAYS[way])
    teacher = CopiedTeacher(model) if native else None
    distiller = SelfDistiller(model, consistency, teacher=teacher, one_pass=passes != "two")
    labelled = Labelled.of(data)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    total, earlier = 0.0, None
    with distiller.active():
        if passes == "sequential":
            earlier = StandardRequest(labelled, labelled.n_labels)
            with rope_view(model, "standard"):
                model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: earlier})
            earlier.result.loss.backward()
            total = earlier.result.loss.detach()
        request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents, earlier)
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        request.result.loss.backward()
    if earlier is not None:
        torch.testing.assert_close(request.result.rows.ce.sum(), earlier.result.rows.ce.sum())
    actual = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected, factors = by_hand(model, data, consistency, native)
    expected.backward()
    assert len(set(factors.values())) > {"plain": 0, "top": 1}.get(way, 3), "some rows are weighed"
    torch.testing.assert_close(total + request.result.loss.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
    for name, p in model.named_parameters():
        torch.testing.assert_close(actual[name], p.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item() + 1e-9)
    if consistency.kl_top is not None:
        chosen = {(r, i) for r, i in request.result.in_kl.nonzero().tolist()}
        assert chosen == {place for place, factor in factors.items() if factor > 0}


def test_evaluation_weighs_all_alike():
    data, results = batch("plain"), []
    for options in ({}, WAYS["both"]):
        model = patch_model(tiny(), "skip", split=SPLIT, skip=SKIP).eval()
        labelled = Labelled.of(data)
        request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents)
        distiller = SelfDistiller(model, ViewConsistency(**options))
        with distiller.active(), torch.no_grad():
            model(input_ids=data["input_ids"], logits_to_keep=1, use_cache=False, **{REQUEST: request})
        results.append(request.result.rows.kl)
    assert torch.equal(*results) and results[0].gt(0).any()


def test_the_largest_of_each_group_are_kept():
    value = torch.tensor([1.0, 5.0, 3.0, 9.0, 8.0, 7.0, 2.0])
    group = torch.tensor([1, 1, 1, 0, 0, 1, 4])
    assert top_share(value, group, 0.5).tolist() == [False, True, False, True, False, True, True]
    assert top_share(value, group, 0.1).tolist() == [False, False, False, True, False, True, True]
    assert not len(top_share(value[:0], group[:0], 0.5))


class _Multiplications(torch.overrides.TorchFunctionMode):
    """Notes the products with a trained weight for which autocast would keep a cast weight without a gradient."""

    def __init__(self):
        super().__init__()
        self.without_gradient = 0
        self.kept = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and args[1].requires_grad and not torch.is_grad_enabled():
            self.without_gradient += 1
            if torch.is_autocast_cache_enabled():
                self.kept.append(args[1].shape)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("native", [False, True], ids=["self", "native"])
def test_autocast_keeps_no_weight_that_was_cast_to_choose_rows(native):
    """Torch before 2.11 hands a weight that was cast without gradients to the forward that wants them."""
    model = patch_model(patch_model(tiny(), "pi", factor=2.0), "skip", skip=Uniform(1, 9)).train()
    consistency = ViewConsistency(kl_top=0.5, kl_longce=LongCE(short_context=5, stride=3))
    distiller = SelfDistiller(model, consistency, teacher=CopiedTeacher(model) if native else None)
    data = batch("plain")
    labelled = Labelled.of(data)
    request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents)
    with distiller.active(), torch.autocast("cpu", torch.bfloat16), _Multiplications() as seen:
        model(input_ids=data["input_ids"], logits_to_keep=1, use_cache=False, **{REQUEST: request})
    assert seen.without_gradient and not seen.kept
