"""YaRN: frequencies, softmax scales that hold its factor, what is refused."""

import copy
import math

import pytest
import torch
from support.rescalings import FACTOR, PAIR, THETA, THETA_2, Case, D, L, require_formula
from support.tiny import WINDOW, gemma3, tiny, tokens
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from rope_patch import native_rope, patch_model, unpatch_model

SHARPER = 0.1 * math.log(FACTOR) + 1  # of cos and sin
MSCALES = (0.1 * 0.5 * math.log(FACTOR) + 1) / (0.1 * 2 * math.log(FACTOR) + 1)


def by_parts(origin=WINDOW, theta=THETA, attention=SHARPER, fast=32, slow=1, truncate=True):
    def c(turns):
        return D * math.log(origin / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = (math.floor(c(fast)), math.ceil(c(slow))) if truncate else (c(fast), c(slow))
    low, high, native = max(low, 0), min(high, D - 1), theta ** (-2 * PAIR / D)
    g = 1 - ((PAIR - low) / (high - low)).clamp(0, 1)
    return lambda seq_len: ((1 - g) * native / FACTOR + g * native, attention)


CASES = {"yarn": Case({"factor": FACTOR}, by_parts())}
FAR = {"original_max_position_embeddings": 4096}  # where both ends of the ramp are among the four frequencies
OPTIONS = {
    "original_max_position_embeddings": (FAR, by_parts(4096), 4096),
    "rope_theta": ({"rope_theta": THETA_2}, by_parts(theta=THETA_2), WINDOW),
    "attention_factor": ({"attention_factor": 1.3}, by_parts(attention=1.3), WINDOW),
    "beta_fast": ({**FAR, "beta_fast": 4}, by_parts(4096, fast=4), 4096),
    "beta_slow": ({**FAR, "beta_slow": 0.1}, by_parts(4096, slow=0.1), 4096),
    "mscales": ({"mscale": 0.5, "mscale_all_dim": 2.0}, by_parts(attention=MSCALES), WINDOW),
    "truncate": ({"truncate": False}, by_parts(truncate=False), WINDOW),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_off_its_default(option):
    options, expected, origin = OPTIONS[option]
    require_formula("yarn", Case({"factor": FACTOR, **options}, expected), 4 * origin)


def deepseek():
    config = DeepseekV3Config(
        vocab_size=101, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
        max_position_embeddings=WINDOW, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval()


@torch.no_grad()
def test_softmax_scales_that_hold_yarns_factor_follow(tmp_path):
    model = deepseek()
    scale = model.model.layers[0].self_attn.scaling
    ids = tokens(1, L)
    plain = model(ids).logits
    patch_model(model, "yarn", factor=FACTOR, mscale=1.0, mscale_all_dim=1.0)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(scale * (0.1 * math.log(FACTOR) + 1) ** 2)
    logits = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)
    with native_rope(model):
        assert torch.equal(model(ids).logits, plain)
    assert torch.equal(unpatch_model(model)(ids).logits, plain)


@pytest.mark.parametrize("options", [{"mscale_all_dim": 0.5}, {"mscale_all_dim": 0.5, "attention_factor": 1.2}])
def test_a_scale_of_the_softmax_is_refused_where_the_softmax_has_none(options):
    model = deepseek()
    scale = model.model.layers[0].self_attn.scaling
    patch_model(model, "yarn", factor=FACTOR, **options)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(scale * (0.05 * math.log(FACTOR) + 1) ** 2)
    for other in (tiny(), gemma3()):
        before = copy.deepcopy(other.config.to_dict())
        with pytest.raises(
            ValueError, match="mscale_all_dim must come with mscale for model type '(llama|gemma3_text)'"
        ):
            patch_model(other, "yarn", factor=FACTOR, **options)
        assert other.config.to_dict() == before
        patch_model(other, "yarn", factor=FACTOR, mscale=1.0, mscale_all_dim=0.5)


@pytest.mark.parametrize(("options", "is_read"), [({}, True), ({"truncate": True}, True), ({"truncate": False}, False)])
def test_an_option_that_transformers_drops_for_layer_types_is_refused(options, is_read):
    """It looks for `truncate` beside the layer types of Gemma 3, where no such key can be."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **shape, vocab_size=16, head_dim=64, num_hidden_layers=2, layer_types=types, max_position_embeddings=512
    )
    model = Gemma3ForCausalLM(config)
    before = copy.deepcopy(model.config.to_dict())
    if is_read:
        patch_model(model, "yarn", factor=4.0, **options)
        return
    with pytest.raises(ValueError, match="truncate=False has no effect for .*gemma3_text.*Leave that option out"):
        patch_model(model, "yarn", factor=4.0, **options)
    assert model.config.to_dict() == before
