"""Distillation against losses and gradients of a decoder in float64 that shares no code with what is tested."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import oracle
from support.tiny import tiny, tokens, transformed_logits

from rope_kernels import attention_map_kl_ref, relation_kl_ref
from rope_kernels.row_kl import custom_op
from rope_patch import describe, native_rope, patch_model, rope_view
from rope_patch.losses import (
    REQUEST,
    CopiedTeacher,
    HiddenDistiller,
    HiddenTargets,
    LogitKL,
    LongCE,
    RelationDistiller,
    RelationTargets,
    SelfDistiller,
    SharedTeacher,
    ViewConsistency,
    WeightedNextToken,
    relations,
)
from rope_patch.rope.rotary import find_decoder, named_rotary_modules
from rope_patch.views import Skip, Uniform

L = 20


def batch(kind):
    """Inputs of the model, and for the oracle: true positions and which tokens see which, [batch, n, n]."""
    ids = tokens(2, L)
    index, inputs = torch.arange(L).expand(2, L), {"input_ids": ids}
    document = torch.zeros(2, L, dtype=torch.int64)
    if kind in ("right", "left"):
        cut = slice(14, L) if kind == "right" else slice(0, 6)
        document[1, cut] = -1
        inputs["attention_mask"] = (document >= 0).long()
        if kind == "left":  # as a padding tokenizer's collator would, positions run over the padding too
            inputs["position_ids"] = index
    if kind == "packed":
        document[0, 8:] = 1
        document[1, 3:] = 1
        index = torch.cat([torch.arange(n) for n in (8, L - 8, 3, L - 3)]).view(2, L)
        inputs["position_ids"] = index
    visible = (document[:, :, None] == document[:, None]) & (document >= 0)[:, :, None] & oracle.causal(L)
    return inputs, index, visible, document >= 0


def frequencies_of(model):
    module = next(m for _, m in named_rotary_modules(find_decoder(model)))
    return module.inv_freq.clone(), module.attention_scaling


def record(weights, config, inputs, index, visible, frequencies, factor=1.0):
    layers = []
    logits = oracle.logits(weights, config, inputs["input_ids"], index, visible, frequencies, factor, record=layers)
    return layers, logits


def relation_sums(student, teacher, visible, targets, factor=1.0, suffix=""):
    """Sum over tokens and mean over heads and layers, by target, from the formula."""
    sums = {}
    see = visible[:, None]
    layers = range(len(student)) if targets.layers is None else targets.layers
    scale = student[0]["v"].shape[-1] ** -0.5
    for name in targets.weights:
        total = 0
        for i in layers:
            s, t = student[i], teacher[i]
            if name == "attention":
                kl = attention_map_kl_ref(
                    s["q"], s["k"], t["q"], t["k"], see, student_scale=scale / factor**2, teacher_scale=scale
                )
            else:
                key = name if name == "v" else name + suffix
                student_scale = scale if name == "v" else scale / factor**2
                if targets.divergence == "kl":
                    kl = relation_kl_ref(s[key], t[key], see, student_scale=student_scale, teacher_scale=scale)
                else:
                    maps = [
                        (x @ x.transpose(-1, -2) * c).masked_fill(~see, -torch.inf).softmax(-1).nan_to_num(0)
                        for x, c in ((s[key], student_scale), (t[key], scale))
                    ]
                    kl = (maps[0] - maps[1]).square().sum(-1)
            heads = kl.shape[1] if targets.denominator == "own_heads" else s["q"].shape[1]
            total = total + kl.sum() / heads
        sums[name] = total / len(list(layers))
    return sums


def same_gradients(parameters, expected, tolerance=1e-5):
    for name, parameter in parameters:
        gradient, right = parameter.grad, expected[name].grad
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        right = torch.zeros_like(expected[name]) if right is None else right
        scale = right.abs().max() + 1e-6
        assert (gradient.double() - right).abs().max() <= tolerance * scale, name


VARIANTS = {
    "paper": {},
    "w/o V": {"v": 0.0},
    "ATTN+V": {"q": 0.0, "k": 0.0, "attention": 1.0},
    "all, weighted": {"q": 0.5, "k": 2.0, "attention": 0.3},
    "two layers": {"layers": (0, 2)},
    "pre-RoPE": {"rope": "pre"},
    "authors' heads": {"denominator": "query_heads"},
    "no YaRN factor": {"strip_attention_factor": True, "attention": 1.0},
    "MSE": {"divergence": "mse"},
}


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "plain"), ("qwen3", "right"), ("mistral", "left"), ("llama", "packed")]
)
def test_loss_and_gradients_of_full_training(family, kind):
    check_full(family, "sdpa", kind, {}, checkpointing=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant):
    check_full("qwen3", "sdpa", "right", VARIANTS[variant], checkpointing=True)


def test_a_checkpointed_layer_computes_its_kl_once(monkeypatch):
    """The layer runs again in backward, and takes from its first run what the forward of the KL found."""
    forwards, forward = [], custom_op._forward
    monkeypatch.setattr(custom_op, "_forward", lambda *args: forwards.append(args) or forward(*args))
    check_full("llama", "sdpa", "plain", {"attention": 1.0}, checkpointing=True)
    n_layers = tiny().config.num_hidden_layers
    assert len(forwards) == 2 * n_layers  # of q, k and v together, and of the map


def test_relations_that_fill_a_gpu_are_launched_alone(monkeypatch):
    forwards, forward = [], custom_op._forward
    monkeypatch.setattr(custom_op, "_forward", lambda *args: forwards.append(args) or forward(*args))
    monkeypatch.setattr(relations, "_FILLS_A_GPU", 1)
    check_full("llama", "sdpa", "plain", {}, checkpointing=True)
    assert len(forwards) == 3 * tiny().config.num_hidden_layers


@pytest.mark.usefixtures("flex_runs_eagerly")
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_every_attention_implementation_with_checkpointing(attention):
    # flex attention has no gradient on a CPU; tests/gpu has it
    gradients = attention != "flex_attention"
    check_full("llama", attention, "packed", {"attention": 1.0}, checkpointing=gradients, gradients=gradients)


def check_full(family, attention, kind, options, *, checkpointing, gradients=True):
    shape = {} if gradients else {"head_dim": 16, "hidden_size": 64}
    model = tiny(family, attention, dtype=torch.float64 if gradients else torch.float32, **shape)
    native = frequencies_of(model)[0]
    inputs, index, visible, valid = batch(kind)
    weights, teacher_weights = oracle.weights_of(model), oracle.weights_of(model)
    patch_model(model, "yarn", factor=4.0)
    frequencies, factor = frequencies_of(model)
    targets = RelationTargets(**options)
    distiller = RelationDistiller(
        model, targets, CopiedTeacher(model), logit_kl=LogitKL(weight=0.7, last=5, temperature=2.0)
    )
    move(model, weights)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    n_tokens = valid.sum()
    with distiller.active(), torch.set_grad_enabled(gradients):
        request = distiller.request(**inputs)
        model(**inputs, use_cache=False, logits_to_keep=1, **{REQUEST: request})
        sums = {name: request.loss(name) for name in targets.weights}
        loss = sum(w * sums[name] for name, w in targets.weights.items()) / n_tokens + 0.7 * request.logit_kl / 10
        if gradients:
            loss.backward()

    student, logits = record(weights, model.config, inputs, index, visible, frequencies, factor)
    with torch.no_grad():
        teacher, teacher_logits = record(teacher_weights, model.config, inputs, index, visible, native)
    expected = relation_sums(
        student,
        teacher,
        visible,
        targets,
        factor if targets.strip_attention_factor else 1.0,
        "_pre" if targets.rope == "pre" else "",
    )
    last = valid & (visible.sum(1) <= 5)  # few tokens of the document see them
    p, q = ((z[last] / 2).log_softmax(-1) for z in (teacher_logits, logits))
    logit_kl = (p.exp() * (p - q)).sum()
    right = sum(w * expected[name] for name, w in targets.weights.items()) / n_tokens + 0.7 * logit_kl / 10
    tolerance = {"rtol": 1e-5 if gradients else 1e-3, "atol": 1e-8}
    for name in targets.weights:
        assert expected[name] > 0
        torch.testing.assert_close(sums[name].double(), expected[name], **tolerance)
    torch.testing.assert_close(request.logit_kl.double(), logit_kl, **tolerance)
    if gradients:
        right.backward()
        same_gradients(model.named_parameters(), weights)


def move(model, weights):
    """Away from the teacher, as training does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.02 * torch.randn_like(parameter)
            parameter += noise
            weights[name] += noise


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", True), ("qwen3", False)])
def test_a_teacher_in_the_same_weights(family, checkpointing):
    """LoRA with dropout: the teacher is the base model at native RoPE, gradients reach the adapters alone."""
    model = tiny(family, dtype=torch.float64)
    native = frequencies_of(model)[0]
    base = {n: w.detach() for n, w in oracle.weights_of(model).items()}
    patch_model(model, "pi", factor=4.0)
    peft_model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj"]))
    adapters = {}
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn_like(parameter, dtype=torch.float64)
            adapters[name] = parameter.detach().clone().requires_grad_()
    if checkpointing:
        peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    peft_model.train()
    distiller = RelationDistiller(peft_model, RelationTargets(), SharedTeacher(peft_model), offload=True)
    inputs, index, visible, _ = batch("right")
    with distiller.active():
        request = distiller.request(**inputs)
        peft_model(**inputs, use_cache=False, **{REQUEST: request})
        sums = {name: request.loss(name) for name in "qkv"}
        sum(sums.values()).backward()

    merged = dict(base)
    for name, a in adapters.items():
        if "lora_A" in name:
            target = name.removeprefix("base_model.model.").replace("lora_A.default.", "")
            merged[target] = base[target] + 2 * adapters[name.replace("lora_A", "lora_B")] @ a
    student, _ = record(merged, model.config, inputs, index, visible, native / 4)
    teacher, _ = record(base, model.config, inputs, index, visible, native)
    expected = relation_sums(student, teacher, visible, RelationTargets())
    sum(expected.values()).backward()
    for name in "qkv":
        torch.testing.assert_close(sums[name], expected[name], rtol=1e-5, atol=1e-8)
    trained = [(n, p) for n, p in peft_model.named_parameters() if p.requires_grad]
    assert {n for n, _ in trained} == set(adapters)
    same_gradients(trained, adapters)
    assert not any(layer._disable_adapters for layer in distiller.teacher._layers)
    assert describe(peft_model).rescaling == "pi (factor 4.0)"


def test_the_teacher_reads_true_positions_and_the_student_its_view():
    model = tiny(dtype=torch.float64)
    frequencies = frequencies_of(model)[0]
    weights = oracle.weights_of(model)
    patch_model(model, Skip(split=8, skip=30))
    distiller = RelationDistiller(model, RelationTargets(), CopiedTeacher(model))
    inputs, index, visible, _ = batch("plain")
    model.train()
    with distiller.active():
        request = distiller.request(**inputs)
        model(**inputs, use_cache=False, **{REQUEST: request})
    student, _ = record(weights, model.config, inputs, torch.where(index >= 8, index + 30, index), visible, frequencies)
    teacher, _ = record(weights, model.config, inputs, index, visible, frequencies)
    for name, expected in relation_sums(student, teacher, visible, RelationTargets()).items():
        torch.testing.assert_close(request.loss(name), expected, rtol=1e-5, atol=1e-8)


def test_values_of_the_first_layer_do_not_drift():
    """V has no RoPE: before anything is trained, its relations in layer 0 are the teacher's."""
    model = patch_model(tiny(), "pi", factor=4.0)
    distiller = RelationDistiller(model, RelationTargets(layers=(0,)), CopiedTeacher(model))
    inputs = batch("plain")[0]
    with distiller.active(), torch.no_grad():
        request = distiller.request(**inputs)
        model(**inputs, **{REQUEST: request})
    assert request.loss("v") == 0 < request.loss("q")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_hidden_states(family):
    model = tiny(family, dtype=torch.float64)
    native = frequencies_of(model)[0]
    weights, teacher_weights = oracle.weights_of(model), oracle.weights_of(model)
    patch_model(model, "yarn", factor=4.0)
    distiller = HiddenDistiller(model, HiddenTargets(layers=(1, 3)), CopiedTeacher(model, offload=True))
    move(model, weights)
    inputs, index, visible, valid = batch("right")
    with distiller.active():
        request = distiller.request(**inputs)
        model.train()(**inputs, use_cache=False, output_hidden_states=True, **{REQUEST: request})
        request.distance.backward()
    student, _ = record(weights, model.config, inputs, index, visible, *frequencies_of(model))
    teacher, _ = record(teacher_weights, model.config, inputs, index, visible, native)
    expected = 0
    for i in (0, 2):
        s, t = student[i]["hidden"][valid], teacher[i]["hidden"].detach()[valid]
        expected = expected + (1 - (s * t).sum(-1) / s.norm(dim=-1) / t.norm(dim=-1)).sum()
    expected.backward()
    torch.testing.assert_close(request.distance.double(), expected, rtol=1e-4, atol=1e-6)
    same_gradients(model.named_parameters(), weights, tolerance=1e-4)
    assert HiddenTargets().layer_indices(32) == (1, 7, 13, 20, 26, 32) and HiddenTargets().layer_indices(2) == (1, 2)


@pytest.mark.parametrize(("family", "checkpointing"), [("mistral", False), ("qwen3", True)])
def test_hidden_states_short_to_long(family, checkpointing):
    model = tiny(family, dtype=torch.float64)
    native = frequencies_of(model)[0]
    weights, teacher_weights = oracle.weights_of(model), oracle.weights_of(model)
    patch_model(patch_model(model, "abf", theta=5e5), "cream", target=90)
    distiller = HiddenDistiller(model, HiddenTargets(layers=(1, 3), short_to_long=10.0), CopiedTeacher(model))
    move(model, weights)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs, index, visible, valid = batch("right")
    with distiller.active():
        request = distiller.request(**inputs)
        model.train()(**inputs, use_cache=False, output_hidden_states=True, **{REQUEST: request})
        (request.distance + 10.0 * request.far).backward()
    bound = model.model._rope_patch.source.last
    moved = bound.view.rope_index(index, bound.parameters)
    assert (moved != index)[valid].any()
    teacher, _ = record(teacher_weights, model.config, inputs, index, visible, native)
    layers, at = {}, frequencies_of(model)
    for name, positions in (("short", index), ("far", moved)):
        layers[name], _ = record(weights, model.config, inputs, positions, visible, *at)
    pairs = [(1.0, layers["short"][i], teacher[i]) for i in (0, 2)] + [(10.0, layers["far"][2], teacher[2])]
    expected = 0
    for weight, student, right in pairs:
        s, t = student["hidden"][valid], right["hidden"].detach()[valid]
        expected = expected + weight * (1 - (s * t).sum(-1) / s.norm(dim=-1) / t.norm(dim=-1)).sum()
    expected.backward()
    torch.testing.assert_close((request.distance + 10.0 * request.far).double(), expected, rtol=1e-4, atol=1e-6)
    same_gradients(model.named_parameters(), weights, tolerance=2e-4)
    with distiller.active(), torch.no_grad():
        request = distiller.request(**inputs)
        model.eval()(**inputs, use_cache=False, output_hidden_states=True, **{REQUEST: request})
    assert request.far is None and request.distance > 0


def test_nothing_stays_behind():
    model = patch_model(tiny(), "pi", factor=4.0)
    inputs = batch("plain")[0]
    before = copy.deepcopy(model)(**inputs).logits
    distiller = RelationDistiller(model, RelationTargets(rope="pre"), CopiedTeacher(model))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with distiller.active():
        assert torch.equal(model(**inputs).logits, before), "a forward without a request is the model's own"
        request = distiller.request(**inputs)
        assert torch.equal(model(**inputs, **{REQUEST: request}).logits, before), "and so is one with a request"
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with rope_view(model, Skip(split=3, skip=9)):
        assert not torch.equal(model(**inputs).logits, before)


@pytest.mark.slow
def test_it_compiles():
    model = patch_model(tiny(), "pi", factor=4.0)
    inputs = batch("plain")[0]
    distiller = RelationDistiller(model, RelationTargets(), CopiedTeacher(model))
    losses = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        with distiller.active():
            request = distiller.request(**inputs)
            run(**inputs, use_cache=False, **{REQUEST: request})
            loss = request.loss("q") + request.loss("k")
            model.zero_grad()
            loss.backward()
        losses.append((loss.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    torch.testing.assert_close(*losses)


def test_an_adapter_on_the_head_is_refused_where_the_head_is_read():
    config = LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = patch_model(patch_model(get_peft_model(tiny(), config), "pi", factor=2.0), "skip", skip=Uniform(1, 9))
    teacher = SharedTeacher(model)
    for make in (
        lambda: SelfDistiller(model, ViewConsistency()),
        lambda: WeightedNextToken(model, LongCE()),
        lambda: RelationDistiller(model, RelationTargets(), teacher, logit_kl=LogitKL(weight=1.0)),
    ):
        with pytest.raises(ValueError, match="the output head has an adapter"):
            make()
    RelationDistiller(model, RelationTargets(), teacher)


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere"])
def test_the_logit_kl_is_of_the_logits_that_a_family_makes(kind):
    model = transformed_logits(kind).double()
    patch_model(model, "pi", factor=4.0)
    ids = tokens(2, L)
    distiller = RelationDistiller(model, RelationTargets(), CopiedTeacher(model), logit_kl=LogitKL(weight=1.0, last=L))
    with distiller.active(), torch.no_grad():
        request = distiller.request(input_ids=ids)
        student = model(ids, use_cache=False, **{REQUEST: request}).logits
        with native_rope(model):
            teacher = model(ids).logits
    p, q = (z.double().log_softmax(-1) for z in (teacher, student))
    torch.testing.assert_close(request.logit_kl.double(), (p.exp() * (p - q)).sum(), rtol=1e-4, atol=1e-9)
