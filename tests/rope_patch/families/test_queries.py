"""Where queries come from in models whose norms of queries are an option, which no tiny family has as it comes."""

import copy

import pytest
import torch
from support.families import tiny_family
from support.tiny import tokens

from rope_patch import patch_model
from rope_patch.families.attention_calls import watched_attention


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("stablelm", {"qk_layernorm": True}),
        ("phi", {"qk_layernorm": True}),
        ("cohere", {"use_qk_norm": True}),
        ("glm4_moe", {"use_qk_norm": True}),
        ("persimmon", {"qk_layernorm": False}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    ],
)
@torch.no_grad()
def test_queries_are_scaled_behind_the_norm_also_in_rows_of_as_many_tokens_as_heads(family, option):
    plain = tiny_family(family)
    config = copy.deepcopy(plain.config)
    for name, value in option.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = type(plain)(config).eval()
    n_heads = config.num_attention_heads
    for n in (n_heads, 3 * n_heads):
        seen, ids = [], tokens(2, n)
        with watched_attention(model, lambda call, seen=seen: seen.append((call.query, call.key))):
            model(ids, use_cache=False)
            half = len(seen)
            patched = patch_model(copy.deepcopy(model), "temperature", beta=0.5, original_max_position_embeddings=1)
            patched(ids, use_cache=False)
        (query, key), (scaled, same) = seen[0], seen[half]
        law = 1 + 0.5 * torch.log(1 + torch.arange(n))[:, None]
        torch.testing.assert_close(scaled, query * law, rtol=1e-4, atol=1e-6)
        assert torch.equal(same, key)
