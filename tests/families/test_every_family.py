import re
from contextlib import contextmanager

import pytest
import torch
from support.families import families, tiny_family
from support.tiny import WINDOW, tokens
from torch.nn import functional as F  # noqa: N812

from rope_patch import describe, native_rope, patch_model, rope_view, unpatch_model
from rope_patch.distillation import (
    TAPE,
    CopiedTeacher,
    RelationDistiller,
    RelationTargets,
    ViewConsistency,
    ViewDistiller,
)
from rope_patch.distillation.consistency import ViewTape
from rope_patch.distillation.labelled import Labelled
from rope_patch.limits import why_not_relative
from rope_patch.rotary import find_decoder
from rope_patch.views import Skip

N, SPLIT, SKIP = 20, 8, 30


@contextmanager
def right_or_refused(record_property):
    """The block either does what is right or raises a ValueError of rope_patch itself, whose text is the reason."""
    try:
        yield
    except ValueError as error:
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        if not frame.tb_frame.f_globals["__name__"].startswith("rope_patch"):
            raise
        record_property("refused", str(error))


def logits(model, ids):
    return model(ids, use_cache=False).logits


def same(found, wanted, what):
    error, scale = (found - wanted).abs().max().item(), wanted.std().item()
    assert error <= 1e-4 * scale, f"{what}: off by {error / scale:.1e} standard deviations"


def gradients(model):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same_gradients(found, wanted):
    largest = max(g.abs().max().item() for g in wanted.values())
    assert 0 < largest < float("inf")
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max().item()
        assert error <= 1e-3 * gradient.abs().max().item() + 1e-6 * largest, f"{name}: {error} of {gradient.abs().max()}"


@pytest.mark.parametrize("family", families())
@torch.no_grad()
def test_view(family, record_property):
    model, ids = tiny_family(family), tokens(2, N)
    plain = logits(model, ids)
    other = ids.clone()
    other[:, 0] = 3 + (ids[:, 0] - 2) % 90
    reach = (logits(model, other) - plain)[:, -1].abs().max()
    with right_or_refused(record_property):
        with rope_view(model, "standard"):
            assert torch.equal(logits(model, ids), plain), "the identity view changes logits"
        with rope_view(model, Skip(split=0, skip=13)):
            shifted = logits(model, ids)
        if why_not_relative(find_decoder(model)) is None:
            same(shifted, plain, "a shift of all positions")
        else:
            assert (shifted - plain).abs().max() > 1e-2 * plain.std()
        with rope_view(model, Skip(split=SPLIT, skip=SKIP)):
            seen = logits(model, ids)
            moved = (logits(model, other) - seen)[:, -1].abs().max()
        same(seen[:, :SPLIT], plain[:, :SPLIT], "the prefix of a skip")
        assert (seen - plain)[:, SPLIT:].abs().max() > 1e-4 * plain.std(), "a skip changes nothing"
        assert moved > 0.1 * reach > 0, "token 0 does not reach the last row under a view"
    assert torch.equal(logits(model, ids), plain), "the model is not as it was"


def reloaded(model, folder, ids):
    """Logits of what plain Transformers loads from what the model saves."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    # what Transformers loses of this family's weights without us is no matter of RoPE
    loaded.load_state_dict(model.state_dict())
    return logits(loaded, ids)


RESCALINGS = {"pi": {"factor": 4.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": WINDOW}, "abf": {"theta": 3e6}}


@pytest.mark.parametrize("method", RESCALINGS)
@pytest.mark.parametrize("family", families())
@torch.no_grad()
def test_rescaling(family, method, tmp_path, record_property):
    model, ids = tiny_family(family), tokens(2, N)
    plain = logits(model, ids)
    with right_or_refused(record_property):
        patch_model(model, method, **RESCALINGS[method])
        seen = logits(model, ids)
        assert not torch.equal(seen, plain), "a rescaling changes nothing"
        with native_rope(model):
            assert torch.equal(logits(model, ids), plain), "native RoPE gives other logits"
        found = reloaded(model, tmp_path, ids)
        unpatch_model(model)
        if torch.equal(reloaded(model, tmp_path, ids), plain):
            assert torch.equal(found, seen), "reloaded, the model gives other logits"
        else:  # a sum of this family depends on where in memory its weights are
            torch.testing.assert_close(found, seen, rtol=0, atol=1e-6)
    assert torch.equal(logits(model, ids), plain), "the model is not as it was"


@pytest.mark.parametrize("family", families())
@torch.no_grad()
def test_capture(family, record_property):
    model, ids = tiny_family(family), tokens(2, N)
    ran = set()
    for module in model.modules():
        if re.search(r"(?<!Linear)(?<!Lightning)(Attention|MLA)$", type(module).__name__) and hasattr(module, "layer_idx"):
            module.register_forward_hook(lambda m, *_: ran.add(m.layer_idx))

    def captured(view):
        distiller = RelationDistiller(model, RelationTargets(), CopiedTeacher(model))
        tape = distiller.tape(ids)
        tape.teaching = True  # what it does with a teacher's tensors is to record them
        with distiller.active(), rope_view(model, view):
            model(ids, use_cache=False, **{TAPE: tape})
        return tape.teacher

    with right_or_refused(record_property):
        patch_model(model, Skip(split=SPLIT, skip=SKIP))
        plain, seen = captured("standard"), captured(Skip(split=SPLIT, skip=SKIP))
        assert plain.keys() == seen.keys() == ran, f"attention ran in layers {ran}, captured are {set(plain)}"
        for layer in ran:
            for name, tensor in plain[layer].items():
                assert tensor.shape[2] == N
                same(seen[layer][name][:, :, :SPLIT], tensor[:, :, :SPLIT], f"{name} of layer {layer}, prefix")
        first = min(plain)
        same(seen[first]["v"], plain[first]["v"], "v of the first attention")
        changes = [(plain[i][name] - seen[i][name])[:, :, SPLIT:].abs().max() for i in ran for name in "qk"]
        assert max(changes) > 1e-3


@pytest.mark.parametrize("family", families())
def test_checkpointing(family, record_property):
    model, ids = tiny_family(family).train(), tokens(2, N)
    if not model.supports_gradient_checkpointing:
        record_property("refused", "Transformers has no gradient checkpointing for this family.")
        return

    def step():
        torch.manual_seed(7)
        model.zero_grad()
        with rope_view(model, Skip(split=SPLIT, skip=SKIP)):
            out = logits(model, ids)
        F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        return gradients(model)

    with right_or_refused(record_property):
        wanted = step()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        same_gradients(step(), wanted)


def distilled(model, ids, one_pass):
    torch.manual_seed(7)
    model.zero_grad()
    distiller = ViewDistiller(model, ViewConsistency(), one_pass=one_pass)
    distiller.source.clock.set(3, 0)
    labelled = Labelled.of({"input_ids": ids, "labels": ids.clone()})
    tape = ViewTape(labelled, labelled.n_labels, labelled.n_documents, ids)
    with distiller.active():
        model(input_ids=ids, use_cache=False, logits_to_keep=1, **{TAPE: tape})
        tape.loss.backward()
    assert torch.isfinite(tape.loss)
    return tape.attention is not None, tape, gradients(model)


@pytest.mark.parametrize("family", families())
def test_self_distill(family, record_property):
    model, ids = tiny_family(family).train(), tokens(2, N)
    with right_or_refused(record_property):
        patch_model(model, Skip(split=SPLIT, skip=SKIP))
        one_pass, tape, found = distilled(model, ids, one_pass=True)
        record_property("passes", "one" if one_pass else "two")
        assert tape.rows.kl.max() > 1e-6
        # cross-entropy by hand
        torch.manual_seed(7)
        with torch.no_grad(), rope_view(model, "standard"):
            wanted = F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        torch.testing.assert_close(tape.rows.ce.mean(), wanted, rtol=1e-4, atol=1e-5)
        if one_pass:
            _, two, wanted = distilled(model, ids, one_pass=False)
            torch.testing.assert_close(tape.loss, two.loss, rtol=1e-4, atol=1e-5)
            same_gradients(found, wanted)


@pytest.mark.parametrize("family", families())
def test_relation_distill(family, record_property):
    model, ids = tiny_family(family).train(), tokens(2, N)
    with right_or_refused(record_property):
        patch_model(model, Skip(split=SPLIT, skip=SKIP))
        teacher = CopiedTeacher(model)
        distiller = RelationDistiller(model, RelationTargets(), teacher)
        tape = distiller.tape(ids)
        with distiller.active():
            model(input_ids=ids, use_cache=False, logits_to_keep=1, **{TAPE: tape})
            loss = sum(tape.loss(name) for name in "qkv")
            loss.backward()
        assert torch.isfinite(loss) and loss > 1e-6
        found = gradients(model)
        assert all(torch.isfinite(g).all() for g in found.values()) and any(g.abs().max() > 0 for g in found.values())
