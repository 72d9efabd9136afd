"""Distillation where only a GPU shows it: gradients through flex attention and FlashAttention, bf16."""

import pytest
import torch
from support.batches import batch
from support.flash import require
from support.tiny import MIXED, tiny

from rope_patch import patch_model
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import (
    REQUEST,
    CopiedTeacher,
    LogitKL,
    NativeDistiller,
    NativeRequest,
    NativeTargets,
    RelationDistiller,
    RelationTargets,
    SelfDistiller,
    ViewConsistency,
    ViewRequest,
)
from rope_patch.views import Uniform

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 256}
ATTENTION = ["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_4"]


def two_views(family, attention, dtype, data, one_pass, rounded_to):
    shape = {**SHAPE, **(MIXED if "mixed" in family else {})}
    model = tiny(family.removesuffix("-mixed"), attention, **shape)
    with torch.no_grad():  # as steep as a model of 32 features; steeper attention blows up the rounding of bf16
        for parameter in model.parameters():
            parameter.mul_(0.35 if parameter.ndim > 1 else 1.0)
    model = model.to(rounded_to).to(dtype)
    model = patch_model(model.cuda(), "skip", skip=Uniform(1, 40)).train()
    distiller = SelfDistiller(model, ViewConsistency(), one_pass=one_pass)
    assert distiller.one_pass == one_pass
    distiller.view.clock.set(3, 0)
    labelled = Labelled.of(data)
    request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    with distiller.active():
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        request.result.loss.backward()
    return request.result.loss.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3-mixed"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_one_pass_is_two_passes(attention, family, kind):
    require(attention)
    torch.manual_seed(0)
    data = {name: value.cuda() for name, value in batch(kind).items()}
    dtype = torch.bfloat16 if "flash" in attention else torch.float32
    loss, grad = two_views(family, attention, dtype, data, True, dtype)
    expected, wanted_grad = two_views(family, "sdpa", torch.float32, data, False, dtype)
    torch.testing.assert_close(loss, expected, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=0)
    error = (grad - wanted_grad).norm() / wanted_grad.norm()
    assert error < (5e-2 if dtype == torch.bfloat16 else 5e-3)


@pytest.mark.parametrize("kind", ["plain", "right", "packed"])
def test_relations_through_flex_attention_are_those_of_sdpa(kind):
    torch.manual_seed(0)
    data = {name: value.cuda() for name, value in batch(kind).items() if name != "labels"}
    actual = []
    for attention in ("flex_attention", "sdpa"):
        model = patch_model(tiny("llama", attention, **SHAPE).cuda(), "yarn", factor=4.0).train()
        distiller = RelationDistiller(model, RelationTargets(attention=1.0), CopiedTeacher(model))
        with distiller.active():
            request = distiller.request(**data)
            model(**data, use_cache=False, logits_to_keep=1, **{REQUEST: request})
            loss = sum(request.loss(name) for name in distiller.targets.weights)
            loss.backward()
        actual.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    (loss, grad), (expected, wanted_grad) = actual
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    assert (grad - wanted_grad).norm() < 5e-3 * wanted_grad.norm()


def offloaded(objective, offload, data, dtype):
    """Loss and gradients with a copy that does or does not wait on the CPU between steps."""
    model = patch_model(tiny("llama", "sdpa", dtype, **SHAPE).cuda(), "pi", factor=4.0)
    model = patch_model(model, "skip" if objective != "relations" else "standard").train()
    teacher, labelled = CopiedTeacher(model, offload=offload), Labelled.of(data)
    divisors = labelled.n_labels, int(labelled.valid.sum())
    if objective == "native":
        targets = NativeTargets(clm_weight=0.3, text_weight=0.2)
        distiller = NativeDistiller(model, targets, teacher, offload=offload)
        request = NativeRequest(labelled, *reversed(divisors), labelled.n_next)
    elif objective == "relations":
        targets = RelationTargets(k=0.0, v=0.0)
        distiller = RelationDistiller(model, targets, teacher, logit_kl=LogitKL(weight=1.0), offload=offload)
        request = distiller.request(data["input_ids"], data.get("attention_mask"), data.get("position_ids"))
    else:
        distiller = SelfDistiller(model, ViewConsistency(), teacher=teacher)
        request = ViewRequest(labelled, *divisors)
    model.model._rope_patch.source.clock.set(3, 0)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    with distiller.active():
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        losses = {"relations": lambda: request.logit_kl / divisors[1], "native": lambda: request.loss}
        loss = losses.get(objective, lambda: request.result.loss)()
        loss.backward()
    assert {p.device.type for p in teacher.copy.parameters()} == {"cpu" if offload else "cuda"}
    return loss.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("objective", ["native", "relations", "self-distill"])
def test_a_teacher_that_waits_on_the_cpu_teaches_the_same(objective, dtype):
    torch.manual_seed(0)
    data = {name: value.cuda() for name, value in batch("packed").items()}
    (loss, grad), (expected, wanted_grad) = (offloaded(objective, offload, data, dtype) for offload in (True, False))
    assert expected > 0
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert (grad - wanted_grad).norm() < 1e-3 * wanted_grad.norm()
