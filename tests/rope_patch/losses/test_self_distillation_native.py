"""Self-distillation from the pretrained model: its teacher, its head, and every way of running."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import oracle
from support.batches import batch
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
from rope_patch.rope.rotary import named_rotary_modules
from rope_patch.views import Uniform

FACTOR = 4.0  # of PI: frequencies / 4


def student(family, adapters=False, view="skip", **options):
    model = tiny(family, dtype=torch.float64)
    if adapters:
        config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, config)
    patch_model(model, "pi", factor=FACTOR)
    return patch_model(model, view, **options).train()


def divergence(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def run(distiller, model, data, sequential=False):
    distiller.view.clock.set(3, 0)
    labelled = Labelled.of(data)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    total, earlier = 0.0, None
    with distiller.active():
        if sequential:
            earlier = StandardRequest(labelled, labelled.n_labels)
            with rope_view(distiller.decoder, "standard"):
                model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: earlier})
            earlier.result.loss.backward()
            total = earlier.result.loss.detach()
        request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents, earlier)
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        request.result.loss.backward()
    return total + request.result.loss.detach(), request


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
        total += divergence(seen[0, :-1].softmax(-1), target[0, :-1].softmax(-1)).sum()
    torch.testing.assert_close(request.result.rows.kl.sum().double(), total, rtol=1e-4, atol=1e-5)


def test_a_rescaled_model_needs_no_view():
    data, model = batch("plain"), student("qwen3", view="standard")
    _, request = run(SelfDistiller(model, ViewConsistency(), teacher=CopiedTeacher(model)), model, data)
    p, q = (m(data["input_ids"]).logits.double().softmax(-1) for m in (model, tiny("qwen3", dtype=torch.float64)))
    kl = divergence(p, q)[:, :-1].sum()
    assert kl > 1e-3
    torch.testing.assert_close(request.result.rows.kl.sum().double(), kl, rtol=1e-4, atol=1e-6)


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
