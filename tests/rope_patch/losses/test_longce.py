"""LongCE's weights against its algorithm written window by window."""

import pytest
import torch
from support.batches import batch, documents_of
from support.tiny import tiny

from rope_patch import patch_model, rope_view
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import LongCE, NextTokenRequest, SelfDistiller, ViewConsistency, ViewRequest, WeightedNextToken
from rope_patch.losses.forward_loss import REQUEST

K, D = 5, 3


def weights_by_hand(model, data, cap):
    """w of each predicted token (row, token), and its cross-entropy with gradient."""
    weights, losses = {}, {}
    for row, first, length in documents_of(data):
        ids = data["input_ids"][row, first : first + length]
        labels = data["labels"][row, first : first + length].tolist()
        with rope_view(model, "standard"):
            full = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        ce = {i: -full[i - 1, ids[i]] for i in range(1, length)}
        w = dict.fromkeys(ce, 1.0)
        start = 0
        while start < length - K:
            more = min(D, length - K - start)
            with torch.no_grad(), rope_view(model, "standard"):
                short = model(ids[None, start : start + K + more], use_cache=False).logits[0].double().log_softmax(-1)
            for i in range(start + K, start + K + more):
                w[i] = min((-short[i - start - 1, ids[i]] - ce[i]).exp().item(), cap)
            start += D
        for i in range(1, length):
            if labels[i] != -100:
                weights[row, first + i], losses[row, first + i] = w[i], ce[i]
    return weights, losses


def run(distiller, data):
    labelled = Labelled.of(data)
    if isinstance(distiller, SelfDistiller):
        request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents)
    else:
        request = NextTokenRequest(labelled, labelled.n_labels)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    with distiller.active():
        distiller.causal_lm(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        request.result.loss.backward()
    return request


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "plain"), ("qwen3", "right"), ("mistral", "left"), ("qwen3", "packed"), ("llama", "completion")],
)
def test_loss_weights_and_gradients_are_those_of_the_algorithm(family, kind):
    torch.manual_seed(2)
    data = batch(kind)
    model = patch_model(tiny(family, dtype=torch.float64), "standard").train()
    request = run(WeightedNextToken(model, LongCE(short_context=K, stride=D, cap=2.0)), data)
    actual = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    weights, losses = weights_by_hand(model, data, cap=2.0)
    expected = sum(weights[place] * losses[place] for place in losses) / len(losses)
    expected.backward()
    torch.testing.assert_close(request.result.loss.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
    assert request.result.rows.ce_factor.sum().item() == pytest.approx(sum(weights.values()), rel=1e-4)
    assert len(set(weights.values())) > 3, "some tokens are weighed"
    for name, p in model.named_parameters():
        torch.testing.assert_close(actual[name], p.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item() + 1e-9)


def test_it_weighs_the_standard_view_beside_the_kl():
    data = batch("plain")
    model = patch_model(tiny(dtype=torch.float64), "skip", split=4, skip=30).train()
    plain = run(SelfDistiller(model, ViewConsistency()), data)
    weighted = run(SelfDistiller(model, ViewConsistency(), LongCE(short_context=K, stride=D)), data)
    difference = ((weighted.result.rows.ce_factor - 1) * weighted.result.rows.ce).sum() / Labelled.of(data).n_labels
    torch.testing.assert_close(weighted.result.loss - plain.result.loss, difference)
    torch.testing.assert_close(weighted.result.rows.kl, plain.result.rows.kl)
