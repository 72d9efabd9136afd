"""Self-distillation from the model as it was pretrained, against a decoder in float64 written from the formulas."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import oracle
from support.batches import batch, documents_of
from support.tiny import WINDOW, tiny, tokens

from rope_patch import patch_model
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import (
    REQUEST,
    CopiedTeacher,
    SelfDistiller,
    SharedTeacher,
    StandardRequest,
    ViewConsistency,
    ViewRequest,
)
from rope_patch.patch import rope_view
from rope_patch.rope.rotary import find_causal_lm, named_rotary_modules
from rope_patch.views import Uniform

FACTOR = 4.0  # of PI: frequencies / 4


def student(family, adapters=False, view="skip", **options):
    model = tiny(family, dtype=torch.float64)
    if adapters:
        config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, config)
    patch_model(model, "pi", factor=FACTOR)
    return patch_model(model, view, **options).train()


def divergence(p, q, direction):
    if direction == "forward":
        p, q = q, p
    return (p * (p.log() - q.log())).sum(-1)


def in_formulas(model, native, data, bound, consistency):
    """L_CLM + lambda L_KL of documents alone, KL to the native model in all rows, and gradients of the weights."""
    config = find_causal_lm(model).config
    weights = oracle.weights_of(native)
    teacher = {name: w.detach() for name, w in weights.items()}
    frequencies = oracle.default_frequencies(config)
    ce = kl = 0.0
    n_labels = n_documents = n_tokens = 0
    for number, (row, start, length) in enumerate(documents_of(data)):
        ids = data["input_ids"][row : row + 1, start : start + length]
        t, see = torch.arange(length)[None], oracle.causal(length)[None]
        place = number if bound.documents.length.shape[1] == 1 else (row, start)
        parameters = {
            name: value.expand_as(bound.documents.length)[place].flatten()[0]
            for name, value in bound.parameters.items()
        }
        moved = bound.view.rope_index(t, parameters)
        standard = oracle.logits(weights, config, ids, t, see, frequencies / FACTOR)[0].log_softmax(-1)
        seen = oracle.logits(weights, config, ids, moved, see, frequencies / FACTOR)[0].softmax(-1)
        target = oracle.logits(teacher, config, ids, t, see, frequencies)[0].softmax(-1)
        labels = ids[0, 1:, None]
        ce = ce - standard[:-1].gather(1, labels).sum()
        ce = ce - consistency.view_clm * seen[:-1].gather(1, labels).log().sum()
        rows = divergence(seen[:-1], target[:-1], consistency.direction).sum()
        kl = kl + (rows if consistency.reduction == "token" else rows / length)
        n_labels, n_documents, n_tokens = n_labels + length - 1, n_documents + 1, n_tokens + length
    kl = kl / (n_tokens if consistency.reduction == "token" else n_documents)
    loss = ce / n_labels + consistency.kl_weight * kl
    return loss, torch.autograd.grad(loss, list(weights.values())), weights


def run(distiller, model, data, sequential=False):
    distiller.view.clock.set(3, 0)
    labelled = Labelled.of(data)
    divisor = labelled.n_documents
    if distiller.consistency.reduction == "token":
        divisor = labelled.suffix_total(distiller.changes.next_first(labelled))
    inputs = {name: value for name, value in data.items() if name != "labels"}
    total, earlier = 0.0, None
    with distiller.active():
        if sequential:
            earlier = StandardRequest(labelled, labelled.n_labels)
            with rope_view(distiller.decoder, "standard"):
                model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: earlier})
            earlier.result.loss.backward()
            total = earlier.result.loss.detach()
        request = ViewRequest(labelled, labelled.n_labels, divisor, earlier)
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        request.result.loss.backward()
    return total + request.result.loss.detach(), request


@pytest.mark.parametrize(
    ("family", "kind", "direction"),
    [("llama", "plain", "forward"), ("qwen3", "left", "reverse"), ("mistral", "packed", "reverse")],
)
def test_loss_and_gradients_are_those_of_the_formula(family, kind, direction):
    torch.manual_seed(2)
    data = batch(kind)
    data["labels"] = data["input_ids"].clone()
    if "attention_mask" in data:
        data["labels"][data["attention_mask"] == 0] = -100
    model = student(family, skip=Uniform(1, 200))
    native = tiny(family, dtype=torch.float64)
    for reduction in ("sequence", "token"):
        view_clm = 0.3 if reduction == "token" else 0.0
        consistency = ViewConsistency(kl_weight=0.7, direction=direction, reduction=reduction, view_clm=view_clm)
        model.zero_grad()
        distiller = SelfDistiller(model, consistency, teacher=CopiedTeacher(model))
        loss, _ = run(distiller, model, data)
        expected, grads, names = in_formulas(model, native, data, distiller.view.last, consistency)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        parameters = dict(model.named_parameters())
        for name, right in zip(names, grads, strict=True):
            # float32 norms and RoPE inside a float64 model
            assert (parameters[name].grad - right).abs().max() <= 1e-4 * right.abs().max() + 1e-7, name


@pytest.mark.parametrize("passes", ["two", "sequential", "checkpointed"])
def test_every_way_of_running_gives_one_loss(passes):
    data, results = batch("packed"), []
    for way in ("one", passes):
        model = student("llama", adapters=True, skip=Uniform(1, 200))
        if way == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        distiller = SelfDistiller(model, ViewConsistency(), teacher=SharedTeacher(model), one_pass=way != "two")
        loss, request = run(distiller, model, data, way == "sequential")
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert request.result.rows.kl.gt(0).any() and len(gradients) == 12
        results.append((loss, *gradients.values()))
    for first, second in zip(*results, strict=True):
        assert (first - second).abs().max() <= 2e-6 * second.abs().max() + 1e-9


def test_a_copy_goes_where_its_student_has_gone():
    """FSDP2 and DeepSpeed move the student to its device after the copy was made."""
    model = patch_model(tiny(), "pi", factor=FACTOR)
    teacher = CopiedTeacher(model)
    model.to("meta")
    with teacher.ready() as decoder:
        assert {p.device.type for p in decoder.parameters()} == {"meta"}


def test_a_head_that_is_trained_beside_adapters_is_not_the_teachers():
    data, model = batch("plain"), tiny("llama", dtype=torch.float64)
    config = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = patch_model(get_peft_model(model, config), "pi", factor=FACTOR)
    patch_model(model, "skip", skip=Uniform(1, 200)).train()
    native = model.get_base_model().lm_head.original_module.weight.detach().clone()
    trained = model.get_base_model().lm_head.modules_to_save["default"].weight
    with torch.no_grad():
        trained += 0.3 * torch.randn_like(trained)
    distiller = SelfDistiller(model, ViewConsistency(), teacher=SharedTeacher(model))
    assert torch.equal(distiller.teacher.head.weight, native)
    assert distiller.causal_lm.get_output_embeddings().weight is trained
    _, request = run(distiller, model, data)
    config, t, see = distiller.causal_lm.config, torch.arange(19)[None], oracle.causal(19)[None]
    weights = {n: w.detach() for n, w in oracle.weights_of(tiny("llama", dtype=torch.float64)).items()}
    student = {**weights, "lm_head.weight": trained.detach()}
    frequencies, bound = oracle.default_frequencies(config), distiller.view.last
    total = 0.0
    for row in range(2):
        ids = data["input_ids"][row : row + 1]
        moved = bound.view.rope_index(t, {name: value[row] for name, value in bound.parameters.items()})
        target = oracle.logits(weights, config, ids, t, see, frequencies)
        seen = oracle.logits(student, config, ids, moved, see, frequencies / FACTOR)
        total += divergence(seen[0, :-1].softmax(-1), target[0, :-1].softmax(-1), "reverse").sum()
    torch.testing.assert_close(request.result.rows.kl.sum().double(), total, rtol=1e-4, atol=1e-5)


def test_a_rescaled_model_needs_no_view():
    data = batch("right")
    model = student("qwen3", view="standard")
    distiller = SelfDistiller(model, ViewConsistency(kl_weight=1.0), teacher=CopiedTeacher(model))
    loss, _ = run(distiller, model, data)
    native = tiny("qwen3", dtype=torch.float64)
    expected, grads, names = in_formulas(model, native, data, distiller.view.last, ViewConsistency())
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    parameters = dict(model.named_parameters())
    for name, right in zip(names, grads, strict=True):
        assert (parameters[name].grad - right).abs().max() <= 1e-4 * right.abs().max() + 1e-7, name


def test_what_the_teacher_cannot_read_is_refused():
    model = student("llama", skip=Uniform(1, 200))
    distiller = SelfDistiller(model, ViewConsistency(), teacher=CopiedTeacher(model))
    ids = tokens(1, WINDOW + 1)
    with pytest.raises(ValueError, match=f"at most {WINDOW} tokens, its context window, got one of {WINDOW + 1}"):
        run(distiller, model, {"input_ids": ids, "labels": ids})
    plain = patch_model(tiny(), "standard")
    with pytest.raises(ValueError, match="same RoPE"):
        SelfDistiller(plain, ViewConsistency(), teacher=CopiedTeacher(plain))


def test_a_copy_of_a_cast_model_has_the_frequencies_of_pretraining():
    exact = tiny().model.rotary_emb.inv_freq
    model = tiny().to(torch.bfloat16)
    assert not torch.equal(model.model.rotary_emb.inv_freq.float(), exact), "the cast rounds them"
    teacher = CopiedTeacher(patch_model(model, "pi", factor=2.0))
    (rotary,) = (module for _, module in named_rotary_modules(teacher.copy))
    assert torch.equal(rotary.inv_freq, exact)
