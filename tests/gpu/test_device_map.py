"""A model that `device_map` spreads over two GPUs of one process reads, is measured and answers like one on one GPU."""

import copy
from functools import partial

import pytest
import torch
from accelerate import dispatch_model
from support.tiny import MIXED, WINDOW, tiny, tokens
from support.training import tokenizer, trainer

from rope_kernels import attention_map_kl, linear_ce_kl, relation_kl
from rope_patch import native_rope, patch_model, rope_view, unpatch_model
from rope_patch.eval import loss_by_position
from rope_patch.generation.generation import greedy_answers
from rope_patch.views import PerLayer, Skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
L = 20
SKIP = Skip(split=8, skip=30)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def spread(model):
    """The first layer on the first GPU, the others and the norm on the second; the head with what it is tied to."""
    head = 0 if model.config.tie_word_embeddings else 1
    first = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "lm_head": head}
    return dispatch_model(model, {**first, "model.layers.1": 1, "model.layers.2": 1, "model.norm": 1}, main_device=0)


def pair(family="llama", **config):
    """The same model on one GPU, and over two."""
    model = tiny(family, **config)
    return copy.deepcopy(model).cuda(0), spread(model)


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("patched", ["before", "after"])
@pytest.mark.parametrize("view", [SKIP, PerLayer(view=SKIP, layers=(1, 2))], ids=["skip", "per-layer"])
def test_logits_under_a_rescaling_and_a_view(patched, view):
    ids, one, two = tokens(2, L).cuda(0), tiny().cuda(0), tiny()
    plain = logits(one, ids)
    if patched == "before":
        patch_model(two, "yarn", factor=4.0)
    two = spread(two)
    if patched == "after":
        patch_model(two, "yarn", factor=4.0)
    patch_model(one, "yarn", factor=4.0)
    torch.testing.assert_close(logits(two, ids), logits(one, ids), **CLOSE)
    with rope_view(one, view), rope_view(two, view):
        seen = logits(two, ids)
        torch.testing.assert_close(seen, logits(one, ids), **CLOSE)
    assert (seen - logits(two, ids)).abs().max() > 1e-2
    with native_rope(two):
        torch.testing.assert_close(logits(two, ids), plain, **CLOSE)
    torch.testing.assert_close(logits(unpatch_model(two), ids), plain, **CLOSE)


@pytest.mark.parametrize("tied", [False, True])
def test_losses_by_position(tied):
    rows = tokens(2, WINDOW)
    one = tiny(tie_word_embeddings=tied).cuda(0)
    two = spread(tiny(tie_word_embeddings=tied))
    expected, actual = (loss_by_position(patch_model(m, "pi", factor=2.0), rows, progress=False) for m in (one, two))
    torch.testing.assert_close(actual.loss, expected.loss, equal_nan=True, **CLOSE)


@pytest.mark.parametrize(("family", "config"), [("llama", {}), ("qwen3", MIXED)], ids=["llama", "sliding"])
def test_greedy_answers(family, config):
    prompts = [tokens(n).tolist() for n in (L, L, L + 5)]
    expected, actual = (
        greedy_answers(patch_model(m, "pi", factor=2.0), tokenizer(), prompts, max_new_tokens=8)
        for m in pair(family, **config)
    )
    assert actual == expected


def test_trls_loss_is_refused_where_the_head_is_on_another_gpu(tmp_path):
    with pytest.raises(ValueError, match="device_map has put the output head on cuda:1"):
        trainer(tmp_path, model=spread(tiny()), view="skip", use_cpu=False)


def test_a_loss_of_our_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device_map has spread the model over cuda:0, cuda:1"):
        trainer(tmp_path, model=spread(tiny()), objective="self-distill", view="skip", use_cpu=False)


def vocabulary_loss(standard, view, head):
    labels = torch.arange(len(standard), device=standard.device)
    ones = torch.ones(len(standard), device=standard.device)
    return linear_ce_kl(standard, view, head, labels, ones, ones)[0]


@pytest.mark.parametrize(
    ("loss", "shapes"),
    [
        (lambda *x: relation_kl(*x).sum(), [(1, 4, 70, 32)] * 2),
        (lambda *x: relation_kl(*x).sum(), [(1, 4, 300, 64)] * 2),
        (lambda *x: attention_map_kl(*x).sum(), [(1, 4, 70, 32), (1, 2, 70, 32)] * 2),
        (vocabulary_loss, [(9, 32), (9, 32), (50, 32)]),
    ],
    ids=["relation", "relation-hopper", "attention-map", "vocabulary"],
)
def test_kernels_launch_where_their_tensors_are(loss, shapes):
    """Triton's own choice is the current GPU."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    values = [draw(shape).bfloat16() for shape in shapes]
    results = []
    for gpu in (0, 1):
        with torch.cuda.device(0):
            inputs = [x.cuda(gpu).requires_grad_() for x in values]
            total = loss(*inputs)
            total.backward()
        results.append([total.detach().cpu(), *(x.grad.cpu() for x in inputs if x.grad is not None)])
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)
