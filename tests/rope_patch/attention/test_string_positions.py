"""STRING against a decoder in float64 that takes the distance of each pair: prompts, decoding, padding, packing."""

import pytest
import torch
from support import oracle
from support.batches import batch, documents_of
from support.tiny import deaf, tiny, tokens
from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from rope_patch import native_rope, patch_model, rope_view, string_positions
from rope_patch.views import Skip

S, W = 7, 3


def shortened(n):
    """m for m < S, m - S + W from there on, [n, n]."""
    m = torch.arange(n)[:, None] - torch.arange(n)
    return torch.where(m >= S, m - S + W, m)


def expected(model, ids, frequencies=None, factor=1.0):
    n = ids.shape[1]
    return oracle.logits(
        oracle.weights_of(model), model.config, ids, torch.arange(n).expand(ids.shape), oracle.causal(n)[None],
        frequencies, factor, distance=shortened(n)[None],
    ).detach()  # fmt: skip


@pytest.mark.parametrize(
    ("family", "attention", "rows_at_a_time"), [("llama", "sdpa", 1), ("qwen3", "eager", 5), ("mistral", "sdpa", 1000)]
)
def test_a_prompt_is_read_by_the_formula(family, attention, rows_at_a_time, monkeypatch):
    monkeypatch.setattr("rope_patch.attention.string_positions._MASK_ENTRIES", 29 * rows_at_a_time)
    model, ids = tiny(family, attention, dtype=torch.float64), tokens(2, 29)
    plain = model(ids).logits
    with string_positions(model, offset=S, local=W), torch.no_grad():
        actual = model(ids, use_cache=False).logits
    # RoPE and norms are float32 inside a float64 model
    torch.testing.assert_close(actual, expected(model, ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(model(ids).logits, plain), "nothing stays behind"
    assert (actual - plain)[:, S:].abs().max() > 0.05
    torch.testing.assert_close(actual[:, :S], plain[:, :S], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("family", "attention", "first"), [("llama", "sdpa", 4), ("qwen3", "eager", 12)])
def test_decoding_with_a_cache_is_the_prompt(family, attention, first):
    """Prompts that end before and behind the first pair that is far apart, then pieces of 1, 3, 1, ... tokens."""
    model, ids = tiny(family, attention), tokens(2, 29)
    with string_positions(model, offset=S, local=W), torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts, begin, cache = [], 0, None
        for size in (first, *[1, 3] * 10):
            piece = ids[:, begin : begin + size]
            if piece.shape[1]:
                output = model(piece, past_key_values=cache, use_cache=True)
                cache, begin = output.past_key_values, begin + size
                parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "attention"), [("left", "sdpa"), ("right", "eager"), ("packed", "sdpa")])
def test_documents_are_read_as_if_alone(kind, attention):
    data = batch(kind)
    model = tiny("qwen3", attention)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    if kind == "left":  # as generation gives them
        inputs["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with string_positions(model, offset=S, local=W), torch.no_grad():
        actual = model(**inputs, use_cache=False).logits
        for row, begin, length in documents_of(data):
            alone = model(data["input_ids"][row : row + 1, begin : begin + length], use_cache=False).logits[0]
            torch.testing.assert_close(actual[row, begin : begin + length], alone, rtol=1e-4, atol=1e-4)


def test_generation_in_a_padded_batch_is_that_of_each_row():
    model = tiny()
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    ids[1, :8] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with string_positions(model, offset=S, local=W):
        both = model.generate(input_ids=ids, attention_mask=mask, **options)
        for row, first in ((0, 0), (1, 8)):
            alone = model.generate(input_ids=ids[row : row + 1, first:], **options)
            assert torch.equal(both[row, first:], alone[0])
    plain = model.generate(input_ids=ids[:1], **options)
    assert not torch.equal(plain[0], both[0])


def test_it_goes_with_a_rescaling_and_its_factor():
    model, ids = patch_model(tiny("llama", dtype=torch.float64), "yarn", factor=4.0), tokens(1, 29)
    rotary = model.model.rotary_emb
    with string_positions(model, offset=S, local=W), torch.no_grad():
        actual = model(ids, use_cache=False).logits
    right = expected(model, ids, rotary.inv_freq.double(), rotary.attention_scaling)
    torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-4)
    assert rotary.attention_scaling > 1.1


@torch.no_grad()
def test_a_rescaling_within_the_block_is_met_by_far_keys():
    model, ids = tiny(), tokens(1, 29)
    with string_positions(model, offset=S, local=W):
        before = model(ids, use_cache=False).logits
        patch_model(model, "yarn", factor=4.0)
        inside = model(ids, use_cache=False).logits
        with native_rope(model):
            assert torch.equal(model(ids, use_cache=False).logits, before)
    with string_positions(model, offset=S, local=W):
        assert torch.equal(model(ids, use_cache=False).logits, inside) and not torch.equal(inside, before)


def test_the_default_offset_is_a_third_of_the_window():
    model, ids = tiny(), tokens(1, 40)
    with string_positions(model, local=3), torch.no_grad():
        default = model(ids).logits
    with string_positions(model, offset=64 // 3, local=3), torch.no_grad():
        assert torch.equal(model(ids).logits, default)


def smollm3():
    shape = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    return SmolLM3ForCausalLM(SmolLM3Config(**shape, no_rope_layer_interval=2)).eval()


def hunyuan():
    shape = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    return HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**shape)).eval()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: tiny().train(), {}, "is for inference: call model.eval"),
        (lambda: patch_model(tiny(), Skip(split=3, skip=5), when="always"), {}, "would both move positions"),
        (lambda: tiny(attention="flex_attention"), {}, "runs with sdpa and eager attention, got 'flex_attention'"),
        (lambda: patch_model(tiny(), "dynamic-ntk", factor=2.0), {}, "do not depend on length"),
        (tiny, {"offset": 3, "local": 3}, "offset must be an integer of at least 4, got 3"),
        (tiny, {"local": -1}, "local must be an integer of at least 0"),
        (hunyuan, {}, "HunYuanDenseV1Model has weights on queries and keys after RoPE"),
        (smollm3, {"offset": 30, "local": 3}, "has keys that RoPE does not rotate as a whole"),
    ],
)
def test_what_it_cannot_do_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message), string_positions(make(), **{"offset": S, "local": W, **options}):
        pass


def test_training_and_views_are_refused_inside_too():
    model, ids = tiny(), tokens(1, 10)
    with string_positions(model, offset=S, local=W):
        with pytest.raises(ValueError, match="would both move positions"), rope_view(model, Skip(split=3, skip=5)):
            model(ids)
        with pytest.raises(ValueError, match="is for inference"):
            model.train()(ids)


def test_windows_below_the_offset_have_nothing_far():
    model, ids = tiny("mistral-sliding"), tokens(1, 29)
    before = model(ids, use_cache=False).logits
    with string_positions(model, offset=7, local=3):
        assert torch.equal(model(ids, use_cache=False).logits, before)
    with (
        pytest.raises(ValueError, match="no sliding window above offset=5"),
        string_positions(model, offset=5, local=3),
    ):
        model(ids, use_cache=False)


@pytest.mark.parametrize("family", ["nemotron", "falcon", "doge"])
def test_families_that_the_plan_does_not_reach_are_refused(family):
    """Plain attention would be taken for STRING."""
    with (
        pytest.raises(ValueError, match="string_positions needs attention that takes keyword arguments, and "),
        string_positions(deaf(family), offset=S, local=W),
    ):
        pass
