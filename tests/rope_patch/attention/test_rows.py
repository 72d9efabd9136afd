"""Rows without masks of n x n: padded, packed and windowed, with gradients, under views, beside Transformers' masks."""

from contextlib import nullcontext

import pytest
import torch
from support.batches import batch
from support.tiny import MIXED, gemma3, tiny
from torch.nn import functional as F  # noqa: N812

from rope_patch import patch_model
from rope_patch.attention import windowed
from rope_patch.attention.rows import MaskFreeRows, why_masks_stay
from rope_patch.patch import view_source
from rope_patch.views import Uniform

MODELS = {
    "llama": tiny,
    "gemma3": gemma3,
    "mistral": lambda: tiny("mistral-sliding"),
    "qwen3": lambda: tiny("qwen3", **MIXED),
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(windowed, "BLOCK", 4)


def gradients(make_model, data, view, without_masks):
    model = make_model().double().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if view:
        patch_model(model, "skip", skip=Uniform(1, 40))
        view_source(model).clock.set(3, 0)
    # what padding gives is nobody's: labels leave it out
    with MaskFreeRows(model).active() if without_masks else nullcontext():
        loss = model(**data, use_cache=False).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_those_under_masks(family, kind):
    data, view = batch(kind), kind in ("left", "packed")
    loss, found = gradients(MODELS[family], data, view, without_masks=True)
    wanted_loss, wanted = gradients(MODELS[family], data, view, without_masks=False)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-7, atol=0)
    for name, gradient in wanted.items():
        # Gemma and Qwen compute their norms in float32
        assert (found[name] - gradient).norm() <= 1e-6 * (1 + gradient.norm()), name


@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
def test_no_mask_of_n_by_n_reaches_attention(kind, monkeypatch):
    masks, attend, data = [], F.scaled_dot_product_attention, batch(kind)
    n = data["input_ids"].shape[1]
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **o: (masks.append(o.get("attn_mask")), attend(*a, **o))[1]
    )
    model = gemma3().train()
    with MaskFreeRows(model).active():
        model(**data, use_cache=False).loss.backward()
    assert masks and all(mask is None or mask.numel() < n * n for mask in masks)
    masks.clear()
    model(**data, use_cache=False).loss.backward()
    assert any(mask is not None and mask.shape[-2:] == (n, n) for mask in masks)


def test_a_cache_keeps_the_masks_of_transformers():
    model, ids = gemma3(), batch("plain")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    with MaskFreeRows(model).active():
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.config.__setattr__("attn_logit_softcapping", 30.0), "soft-capped"),
        (lambda m: m.config.__setattr__("layer_types", ["chunked_attention"] * 3), "chunked_attention"),
        (lambda m: m.model.layers[0].self_attn.__setattr__("is_causal", False), "not causal"),
        (lambda m: m.set_attn_implementation("eager"), "eager"),
    ],
)
def test_what_needs_its_masks_is_refused(change, reason):
    model = tiny()
    assert why_masks_stay(model) is None
    change(model)
    with pytest.raises(ValueError, match=reason):
        MaskFreeRows(model)


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_attention_drops_what_the_model_drops_in_training_alone(kind, monkeypatch):
    dropped, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **o: (dropped.append(o.get("dropout_p")), attend(*a, **o))[1]
    )
    model = tiny("qwen3", **MIXED, attention_dropout=0.25)
    with MaskFreeRows(model).active():
        for training, rate in ((True, 0.25), (False, 0.0)):
            dropped.clear()
            model.train(training)(**batch(kind), use_cache=False)
            assert dropped and set(dropped) == {rate}


def test_short_rows_keep_their_masks(monkeypatch):
    data, masks, attend = batch("packed"), [], F.scaled_dot_product_attention
    n = data["input_ids"].shape[1]
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **o: (masks.append(o.get("attn_mask")), attend(*a, **o))[1]
    )
    model = gemma3()
    for least in (n, n + 1):
        masks.clear()
        with MaskFreeRows(model, least=least).active():
            model(**data, use_cache=False)
        assert any(mask is not None and mask.shape[-2:] == (n, n) for mask in masks) == (least > n)
