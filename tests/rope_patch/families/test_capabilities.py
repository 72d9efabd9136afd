"""Families that use positions beside RoPE, too: views move all that `position_ids` would, or are refused."""

import pytest
import torch
from support.tiny import VOCAB, tokens
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from rope_patch import describe, patch_model, rope_view
from rope_patch.views import Skip

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 8}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def ministral3(scaled):
    rope_parameters = {**YARN, "llama_4_scaling_beta": 0.3 * scaled}
    return Ministral3ForCausalLM(Ministral3Config(**SHAPE, rope_parameters=rope_parameters))


def mistral4(scaled):
    rope_parameters = {**YARN, "llama_4_scaling_beta": 0.3 * scaled}
    return Mistral4ForCausalLM(Mistral4Config(**SHAPE, **LATENT, rope_parameters=rope_parameters))


def llama4(scaled):
    """One layer of four has no RoPE, and scales its queries instead."""
    sizes = {"intermediate_size_mlp": 48, "num_local_experts": 2, "floor_scale": 4, "attn_temperature_tuning": scaled}
    return Llama4ForCausalLM(Llama4TextConfig(**SHAPE, **sizes))


def test_a_learned_scale_refuses_them_too():
    if "mistral_large4_text" not in CONFIG_MAPPING:
        pytest.skip("a family of a later Transformers")
    config = CONFIG_MAPPING["mistral_large4_text"](**SHAPE, **LATENT, index_n_heads=2, index_head_dim=16)
    with pytest.raises(ValueError, match="scales queries by their position .a learned scale."):
        patch_model(AutoModel.from_config(config), "skip")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("make", [ministral3, mistral4, llama4])
@torch.no_grad()
def test_a_view_is_what_position_ids_are(make, scaled):
    if scaled and make is llama4:
        return  # refused below
    model, ids = make(scaled).eval(), tokens(1, 20)
    index = torch.arange(20)[None] + 50 * (torch.arange(20) >= 9)
    mask = torch.ones(1, 20)  # with one, a jump in position_ids is no border
    expected = model(ids, position_ids=index, attention_mask=mask, use_cache=False).logits
    with rope_view(model, Skip(split=9, skip=50)):
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [ministral3, mistral4])
@torch.no_grad()
def test_a_scale_moves_with_a_view_in_decoding_too(make):
    model, ids = make(True).eval(), tokens(2, 20)
    with rope_view(model, Skip(split=9, skip=50)):
        whole = model(ids, use_cache=False).logits
        begun = model(ids[:, :18], use_cache=True)
        last = model(ids[:, 18:], past_key_values=begun.past_key_values).logits
    torch.testing.assert_close(last, whole[:, 18:], rtol=1e-4, atol=1e-5)
    with rope_view(model, "standard"):
        plain = model(ids, use_cache=False).logits
    assert torch.equal(plain, model(ids, use_cache=False).logits)


@torch.no_grad()
def test_llama_4_counts_tokens_so_that_views_are_refused():
    model, ids = llama4(True).eval(), tokens(1, 20)
    plain = model(ids).logits
    refused = pytest.raises(ValueError, match="scales queries by their position .*, and a view moves RoPE alone")
    with refused:
        patch_model(model, "skip")
    for given in ({"view": "posaug"}, {"index": 3 * torch.arange(20)[None]}):
        with refused, rope_view(model, **given):
            pass
    assert "scales queries by their position" in describe(model).missing_capabilities["views"]
    with rope_view(model, "standard"):
        assert torch.equal(model(ids).logits, plain)
