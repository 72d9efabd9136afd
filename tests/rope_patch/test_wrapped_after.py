"""What comes after the patch: wrapped and removed layers, inference mode, meta, others' hooks."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from support.families import tiny_family
from support.tiny import tiny, tokens
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaForCausalLM

from rope_patch import native_rope, patch_model, rope_view, unpatch_model
from rope_patch.views import Skip

IDS = tokens(2, 12)


@torch.no_grad()
# the second family folds YaRN's factor into its layers' scales
@pytest.mark.parametrize(("family", "wrap"), [("llama", torch.compile), ("deepseek_v3", checkpoint_wrapper)])
def test_layers_that_are_wrapped_after_the_patch(family, wrap):
    torch.manual_seed(0)
    model = tiny_family(family).eval()
    plain = model(IDS).logits
    patch_model(patch_model(model, "yarn", factor=4.0), "skip")
    rescaled = model(IDS).logits
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = wrap(layer, **({"backend": "eager"} if wrap is torch.compile else {}))
    torch.testing.assert_close(model(IDS).logits, rescaled)
    with native_rope(model):
        torch.testing.assert_close(model(IDS).logits, plain)
    unpatch_model(model)
    torch.testing.assert_close(model(IDS).logits, plain)
    assert not hasattr(model.model, "_rope_patch")


def test_layers_that_are_taken_out_after_the_patch():
    model = patch_model(tiny_family("deepseek_v3"), "yarn", factor=4.0)
    model.model.layers = model.model.layers[:1]
    unpatch_model(model)
    assert model.config.rope_parameters["rope_type"] == "default" and not hasattr(model.model, "_rope_patch")


def test_what_inference_mode_has_put_on_may_train():
    model = tiny().train()
    with torch.inference_mode():
        block = rope_view(model, Skip())
        block.__enter__()
        model(IDS)
    model(IDS, labels=IDS).loss.backward()
    block.__exit__(None, None, None)
    with torch.inference_mode():
        patch_model(patch_model(model, "yarn", factor=2.0), "skip")
        model(IDS)
    model(IDS, labels=IDS).loss.backward()
    assert torch.isfinite(model.model.layers[0].self_attn.q_proj.weight.grad).all()


def test_a_model_on_meta():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny().config)
    patch_model(patch_model(model, "yarn", factor=2.0), "skip")
    positions = torch.arange(6, device="meta").repeat(2)[None]
    assert model.train()(IDS[:1].to("meta"), position_ids=positions).logits.shape == (1, 12, 101)
    assert unpatch_model(model).model.rotary_emb.inv_freq.device.type == "meta"


def test_a_forward_that_another_library_has_put_on_a_rotary_module_stays():
    model = tiny()
    rotary = model.model.rotary_emb
    patch_model(model, "yarn", factor=2.0)
    add_hook_to_module(rotary, ModelHook())
    forward = rotary.__dict__["forward"]
    patch_model(model, "pi", factor=2.0)
    assert rotary.__dict__["forward"] is forward
    unpatch_model(model)
    assert rotary.__dict__["forward"] is forward
