"""Distances from the native model, of texts that are read together, against one text at a time in float64."""

import pytest
import torch
from support.tiny import VOCAB, tiny

import native_kl

LENGTHS = [5, 1, 17, 9, 9, 2, 30]


@pytest.fixture(params=["llama", "mistral-sliding"])
def models(request):
    native, model = (tiny(request.param) for _ in range(2))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return native, model


@pytest.fixture(params=[1, 60 * VOCAB, 10**6], ids=["one at a time", "some", "all"])
def logits_at_once(request, monkeypatch):
    monkeypatch.setattr(native_kl, "LOGITS", request.param)


def texts(lengths):
    return [torch.randint(VOCAB, (n,)).tolist() for n in lengths]


@torch.no_grad()
def log_probabilities(model, text):
    return model(input_ids=torch.tensor([text])).logits[0].double().log_softmax(-1)


def test_the_kl_is_the_mean_over_all_tokens(models, logits_at_once):
    native, model = models
    of_texts = texts(LENGTHS)
    total = 0.0
    for text in of_texts:
        log_p, log_q = (log_probabilities(m, text) for m in (native, model))
        total += float((log_p.exp() * (log_p - log_q)).sum())
    assert total > 1
    assert native_kl.kl_from(native, model, iter(of_texts)) == pytest.approx(total / sum(LENGTHS), rel=1e-5)
    assert native_kl.kl_from(native, native, of_texts) == 0


def test_a_reply_is_judged_behind_its_prompt(models, logits_at_once):
    native, _ = models
    prompts, replies = texts([3, 1, 20, 7, 2, 11, 6]), texts(LENGTHS)
    for prompt, reply, loss in zip(prompts, replies, native_kl.losses_of(native, prompts, replies), strict=True):
        log_p = log_probabilities(native, [*prompt, *reply])[len(prompt) - 1 : -1]
        expected = -log_p.gather(1, torch.tensor(reply)[:, None]).mean()
        assert loss == pytest.approx(float(expected), rel=1e-5)


def test_batches_hold_each_text_once_and_no_more_logits_than_may_be_held(monkeypatch):
    monkeypatch.setattr(native_kl, "LOGITS", 40 * VOCAB)
    of_texts = texts(LENGTHS)
    batches = list(native_kl.padded(of_texts, VOCAB))
    assert sorted(k for numbers, _ in batches for k in numbers) == list(range(len(of_texts)))
    for numbers, ids in batches:
        assert len(numbers) == 1 or ids.numel() <= 40
        for k, row in zip(numbers, ids.tolist(), strict=True):
            assert row == of_texts[k] + [0] * (len(row) - LENGTHS[k])
