"""Distillation of native predictions under a view, against a decoder in float64 written from the formula."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import oracle
from support.batches import batch, documents_of
from support.tiny import WINDOW, tiny, tokens, transformed_logits

from rope_patch import patch_model
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import REQUEST, CopiedTeacher, NativeDistiller, NativeRequest, NativeTargets, SharedTeacher
from rope_patch.patch import view_source
from rope_patch.rope.rotary import find_causal_lm, find_decoder
from rope_patch.views import Mix, PosAug, PoSE, Skip, Standard

FACTOR = 4.0  # of PI: frequencies / 4
MIX = Mix([Standard(), PoSE(target=200, chunks=3), PosAug(granularity="sample")])


def student(family="llama", adapters=False, view=MIX, rescale=True):
    model = tiny(family, dtype=torch.float64) if isinstance(family, str) else family
    if adapters:
        config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, config)
    if rescale:
        patch_model(model, "pi", factor=FACTOR)
    return patch_model(model, view, seed=1).train()


def run(model, data, targets, teacher=None):
    """Loss and request; gradients of the student are left on it."""
    distiller = NativeDistiller(model, targets, (teacher or CopiedTeacher(model)) if targets.weight else None)
    view_source(model).clock.set(3, 0)
    labelled = Labelled.of(data)
    request = NativeRequest(labelled, int(labelled.valid.sum()), labelled.n_labels, labelled.n_next)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    with distiller.active():
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        if torch.is_grad_enabled():
            request.loss.backward()
    return request.loss.detach(), request


def test_without_a_kl_no_teacher_reads_and_documents_may_be_longer_than_its_window():
    targets, model = NativeTargets(weight=0.0, clm_weight=1.0), student(view="standard")
    ids = tokens(1, WINDOW + 1)
    data, read = {"input_ids": ids, "labels": ids}, []
    find_decoder(model).register_forward_hook(lambda *_: read.append(1))
    loss, request = run(model, data, targets, None)
    assert len(read) == 1 and request.rows.ce.sum() > 0
    expected = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:])
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)


def divergence(p, q, direction):
    """Of rows of log-probabilities p, the student's, and q, the teacher's."""
    if direction == "jsd":
        middle = ((p.exp() + q.exp()) / 2).log()
        return (divergence(p, middle, "reverse") + divergence(q, middle, "reverse")) / 2
    if direction == "forward":
        p, q = q, p
    return (p.exp() * (p - q)).sum(-1)


def in_formulas(model, data, targets):
    """Loss of documents alone, and gradients of the weights, of which the student has those of `tiny`."""
    config, bound = find_causal_lm(model).config, view_source(model).last
    weights = oracle.weights_of(find_causal_lm(model))
    teacher = {name: w.detach() for name, w in weights.items()}
    frequencies = oracle.default_frequencies(config)
    ce = kl = text = 0.0
    n_labels = n_tokens = n_next = 0
    for number, (row, start, length) in enumerate(documents_of(data)):
        ids = data["input_ids"][row : row + 1, start : start + length]
        t, see = torch.arange(length)[None], oracle.causal(length)[None]
        place = number if bound.documents.length.shape[1] == 1 else (row, start)
        parameters = {n: p.expand_as(bound.documents.length)[place].flatten()[0] for n, p in bound.parameters.items()}
        moved = bound.view.rope_index(t, parameters).double()
        seen = oracle.logits(weights, config, ids, moved, see, frequencies / FACTOR)[0]
        target = oracle.logits(teacher, config, ids, t, see, frequencies)[0]
        soft = [(logits / targets.temperature).log_softmax(-1) for logits in (seen, target)]
        kl = kl + divergence(*soft, targets.direction).sum()
        labels = data["labels"][row, start + 1 : start + length]
        has_label = labels != -100
        ce = ce - seen[:-1].log_softmax(-1)[has_label].gather(1, labels[has_label, None]).sum()
        text = text - seen[:-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum()
        n_labels, n_tokens, n_next = n_labels + int(has_label.sum()), n_tokens + length, n_next + length - 1
    loss = targets.weight * kl / n_tokens + targets.clm_weight * ce / n_labels + targets.text_weight * text / n_next
    return loss, torch.autograd.grad(loss, list(weights.values())), weights, kl.detach(), ce.detach()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {}),
        ("packed", {}),
        ("completion", {"weight": 0.7, "clm_weight": 0.0, "direction": "reverse"}),
        ("packed", {"clm_weight": 0.3, "temperature": 1.5}),
        ("left", {"direction": "jsd", "temperature": 0.8}),
        ("completion", {"text_weight": 0.3}),
        ("right", {"clm_weight": 0.0, "text_weight": 0.7, "temperature": 1.5}),
        ("completion", {"weight": 0.0, "clm_weight": 1.0, "text_weight": 0.3}),
        ("packed", {"weight": 0.0, "clm_weight": 0.0, "text_weight": 0.3}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_formula(kind, options):
    torch.manual_seed(2)
    data, targets, model = batch(kind), NativeTargets(**options), student("qwen3")
    loss, request = run(model, data, targets)
    expected, grads, names, kl, ce = in_formulas(model, data, targets)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    if targets.weight:
        torch.testing.assert_close(request.rows.kl.sum(), kl.to(request.rows.kl.dtype), rtol=1e-4, atol=1e-6)
    if targets.clm_weight:
        torch.testing.assert_close(
            request.rows.ce[request.has_label].sum(), ce.to(request.rows.ce.dtype), rtol=1e-4, atol=1e-6
        )
    parameters = dict(model.named_parameters())
    for name, right in zip(names, grads, strict=True):
        # float32 norms and RoPE inside a float64 model
        assert (parameters[name].grad - right).abs().max() <= 1e-4 * right.abs().max() + 1e-7, name


def test_every_token_but_padding_counts_in_the_kl_and_labels_alone_in_the_cross_entropy():
    data, model = batch("left"), student(view=Skip(split=3, skip=40))
    data["labels"][:, :-2] = -100
    loss, request = run(model, data, NativeTargets(clm_weight=1.0))
    assert len(request.queries) == int(data["attention_mask"].sum()) == 34
    assert (request.rows.kl > 0).sum() >= 31, "all but first tokens, which see themselves alone, and rounding"
    assert (request.rows.ce > 0).sum() == 3 * 2
    data["labels"][:] = -100
    model.zero_grad()
    labelled = Labelled.of(data)
    request = NativeRequest(labelled, 34, 1, 1)
    distiller = NativeDistiller(model, NativeTargets(), CopiedTeacher(model))
    with distiller.active():
        model(data["input_ids"], attention_mask=data["attention_mask"], use_cache=False, **{REQUEST: request})
    assert torch.isfinite(request.loss) and request.loss > 0, "rows without labels have their KL"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_off_are_the_copy_of_the_model_that_came(checkpointed):
    data, results = batch("packed"), []
    native = CopiedTeacher(patch_model(tiny(dtype=torch.float64), "pi", factor=FACTOR))
    for teacher in (None, native):
        torch.manual_seed(4)  # of the adapters
        model = student(adapters=True)
        if checkpointed and teacher is None:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss, _ = run(model, data, NativeTargets(), teacher or SharedTeacher(model))
        results.append((loss, *(p.grad for p in model.parameters() if p.requires_grad)))
    assert len(results[0]) == 13 and all(grad.abs().max() > 0 for grad in results[0])
    for first, second in zip(*results, strict=True):
        assert (first - second).abs().max() <= 2e-6 * second.abs().max() + 1e-9


def test_at_true_positions_of_the_native_model_the_kl_and_its_gradient_are_0():
    data, model = batch("right"), student(view="standard", rescale=False)
    _, request = run(model, data, NativeTargets(clm_weight=1e-12))
    assert request.rows.kl.abs().max() < 1e-6
    assert max(p.grad.abs().max() for p in model.parameters()) < 1e-6
    with pytest.raises(ValueError, match="teacher and student have the same RoPE"):
        NativeDistiller(model, NativeTargets(clm_weight=0.0), CopiedTeacher(model))


@torch.no_grad()
def test_evaluation_draws_nothing_and_measures_what_training_leaves_out():
    data, model = batch("right"), student()
    training, _ = run(model, data, NativeTargets(clm_weight=0.0))
    model.eval()
    loss, request = run(model, data, NativeTargets(clm_weight=0.0))
    again = patch_model(student(), "standard").eval()
    assert torch.equal(loss, run(again, data, NativeTargets(clm_weight=0.0))[0]) and loss != training
    assert request.rows.ce.sum() > 0


@pytest.mark.parametrize(("kind", "temperature"), [("Gemma2", 2.0), ("Cohere", 1.0), ("Granite", 2.0)])
@torch.no_grad()
def test_families_that_scale_or_cap_their_logits(kind, temperature):
    ids = tokens(2, 19)
    data = {"input_ids": ids, "labels": ids.clone()}
    model = student(transformed_logits(kind), view="standard")
    targets = NativeTargets(clm_weight=0.3, temperature=temperature)
    loss, _ = run(model, data, targets)
    seen, target = model.eval()(ids).logits.double(), transformed_logits(kind)
    target.load_state_dict(model.state_dict())
    soft = [(logits / temperature).log_softmax(-1) for logits in (seen, target(ids).logits.double())]
    ce = -seen[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).mean()
    expected = divergence(*soft, "forward").mean() + 0.3 * ce
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0)


def test_autocast_changes_the_loss_by_its_rounding():
    data, model = batch("packed"), student(tiny())
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = run(model, data, NativeTargets())
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    exact, _ = run(student(tiny()), data, NativeTargets())
    assert loss.dtype == torch.float32 and torch.isfinite(grads).all()
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)


def test_documents_beyond_the_window_of_the_teacher_are_refused():
    ids = tokens(1, WINDOW + 1)
    with pytest.raises(ValueError, match=f"reads documents of at most {WINDOW} tokens, its context window, got one of"):
        run(student(view="standard"), {"input_ids": ids, "labels": ids}, NativeTargets())
