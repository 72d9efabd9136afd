"""Shifted sparse attention against a decoder in float64 under a mask that is written out for each head."""

from types import SimpleNamespace

import pytest
import torch
from support import oracle
from support.batches import batch, documents_of
from support.flash import as_flash, emulate
from support.tiny import SLIDING_WINDOW, VOCAB, WINDOW, deaf, tiny, tokens
from torch.nn.attention.flex_attention import create_mask
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

from rope_patch import patch_model, rope_view
from rope_patch.attention.shifted import ShiftedAttention, _Groups
from rope_patch.layout.labelled import Labelled
from rope_patch.views import Skip

# of families that support.tiny does not make
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": WINDOW, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def visible_by_hand(data, group, n_heads, n_kv_heads, window=None):
    """[batch, n_heads, n, n]: the groups of each document as lists of borders, head by head."""
    ids = data["input_ids"]
    rows, n = ids.shape
    seen = torch.zeros(rows, n_heads, n, n, dtype=torch.bool)
    shifted_kv = n_kv_heads // 2
    for row, start, length in documents_of(data):
        for head in range(n_heads):
            is_shifted = head // (n_heads // n_kv_heads) >= n_kv_heads - shifted_kv
            borders = [b for b in range(group // 2 if is_shifted else group, length, group)]
            for q in range(length):
                for k in range(q + 1):
                    apart = any(k < b <= q for b in borders)
                    if not apart and (window is None or q - k < window):
                        seen[row, head, start + q, start + k] = True
    return seen


def positions_of(data):
    index = torch.zeros_like(data["input_ids"])
    for row, start, length in documents_of(data):
        index[row, start : start + length] = torch.arange(length)
    return index


def real(data):
    is_real = torch.zeros_like(data["input_ids"], dtype=torch.bool)
    for row, start, length in documents_of(data):
        is_real[row, start : start + length] = True
    return is_real


def run(model, data, group):
    inputs = {name: value for name, value in data.items() if name != "labels"}
    weight = torch.randn(*data["input_ids"].shape, 101, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with ShiftedAttention(model, group).active():
        logits = model(**inputs, use_cache=False).logits
        (logits * weight)[real(data)].sum().backward()
    return logits, weight


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "plain"), ("qwen3", "left"), ("mistral-sliding", "right"), ("mistral-sliding", "packed")],
)
def test_logits_and_gradients_are_those_of_the_mask(family, kind, attention, monkeypatch):
    torch.manual_seed(3)
    calls, data = emulate(monkeypatch), batch(kind)
    window = SLIDING_WINDOW if "sliding" in family else None
    for group in (5, 8):
        model = tiny(family, "eager" if attention == "eager" else "sdpa", dtype=torch.float64).train()
        if attention == "flash":
            as_flash(model)
        actual, weight = run(model, data, group)
        weights = oracle.weights_of(model)
        seen = visible_by_hand(data, group, 4, 2, window)
        expected = oracle.logits(
            weights,
            model.config,
            data["input_ids"],
            positions_of(data),
            seen.expand(model.config.num_hidden_layers, *seen.shape),
        )
        chosen = real(data)
        # float32 norms and RoPE inside a float64 model
        torch.testing.assert_close(actual[chosen], expected[chosen], rtol=1e-4, atol=1e-5)
        (expected * weight)[chosen].sum().backward()
        for name, p in model.named_parameters():
            right = weights[name].grad
            assert (p.grad - right).abs().max() <= 2e-5 * right.abs().max() + 1e-7, name
    assert bool(calls) == (attention == "flash")


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (6, 3), (3, 3)])
def test_heads_are_split_between_keys_and_values(n_heads, n_kv_heads):
    torch.manual_seed(3)
    data = batch("packed")
    heads = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "hidden_size": 48}
    model = tiny("llama", dtype=torch.float64, **heads).train()
    actual, _ = run(model, data, 4)
    seen = visible_by_hand(data, 4, n_heads, n_kv_heads)
    assert not torch.equal(seen[:, 0], seen[:, -1])
    expected = oracle.logits(
        oracle.weights_of(model),
        model.config,
        data["input_ids"],
        positions_of(data),
        seen.expand(model.config.num_hidden_layers, *seen.shape),
    )
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, SLIDING_WINDOW])
@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed"])
def test_the_mask_of_flex_attention_is_that_mask(kind, window):
    data = batch(kind)
    rows, n = data["input_ids"].shape
    call = SimpleNamespace(query=torch.zeros(rows, 6, n, 8), key=torch.zeros(rows, 3, n, 8))
    mask = _Groups(Labelled.of(data), 5, eager=False).block_mask(call, window)
    padding = ~real(data)[:, None, :, None] & torch.eye(n, dtype=torch.bool)  # sees itself, or its softmax is nan
    dense = create_mask(mask.mask_mod, rows, 6, n, n, device="cpu")
    assert torch.equal(dense, visible_by_hand(data, 5, 6, 3, window) | padding)


@pytest.mark.usefixtures("flex_runs_eagerly")
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_flex_attention_sees_the_same(family):
    """Its gradient needs a GPU."""
    data, shape = batch("packed"), {"head_dim": 16, "hidden_size": 64}
    inputs = {name: value for name, value in data.items() if name != "labels"}
    outputs = []
    for attention in ("flex_attention", "sdpa"):
        model = tiny(family, attention, **shape).train()
        with ShiftedAttention(model, 5).active(), torch.no_grad():
            outputs.append(model(**inputs, use_cache=False).logits[real(data)])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_checkpointing_and_views_change_nothing():
    data, results = batch("packed"), []
    for checkpointing in (False, True):
        model = patch_model(tiny("qwen3", dtype=torch.float64), "pi", factor=4.0).train()
        patch_model(model, Skip(split=3, skip=20))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits, _ = run(model, data, 5)
        results.append((logits.detach(), *(p.grad for p in model.parameters())))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    model = tiny("qwen3", dtype=torch.float64).train()
    t = positions_of(data)
    with rope_view(model, index=torch.where(t >= 3, t + 20, t) / 4.0):
        plain, _ = run(model, data, 5)
    torch.testing.assert_close(results[0][0], plain.detach(), rtol=1e-4, atol=1e-5)


def test_evaluation_and_what_follows_attend_to_all():
    model, ids = tiny(), tokens(2, 19)
    before = model(ids).logits
    attention = ShiftedAttention(model, 4)
    with attention.active():
        assert torch.equal(model(ids).logits, before)
        assert not torch.allclose(model.train()(input_ids=ids, use_cache=False).logits, before)
    assert torch.equal(model(ids).logits, before) and not model.model._forward_pre_hooks


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ids_may_come_by_place(attention):
    """As GPT-NeoX's causal LM hands them to its decoder."""
    config = GPTNeoXConfig(**SHAPE, attention_dropout=0.0, hidden_dropout=0.0)
    model = GPTNeoXForCausalLM._from_config(config, attn_implementation=attention).train()
    data = batch("packed")
    inputs = {name: value for name, value in data.items() if name != "labels"}
    with ShiftedAttention(model, 5).active(), torch.no_grad():
        packed = model(**inputs, use_cache=False).logits
        for row, start, length in documents_of(data):
            alone = model(data["input_ids"][row : row + 1, start : start + length], use_cache=False).logits[0]
            torch.testing.assert_close(packed[row, start : start + length], alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(packed, model(**inputs, use_cache=False).logits, atol=1e-3)


def gemma3_with_vision(attention="sdpa"):
    text = {**SHAPE, "head_dim": 16, "sliding_window": SLIDING_WINDOW}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attention).train()


@pytest.mark.usefixtures("flex_runs_eagerly")
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "flash"])
@pytest.mark.parametrize("kind", ["left", "packed"])
@torch.no_grad()
def test_masks_that_the_model_around_the_decoder_has_finished(kind, attention, monkeypatch):
    calls = emulate(monkeypatch)
    first = "sdpa" if attention == "flash" else attention
    model, data = gemma3_with_vision(first), batch(kind)
    text = Gemma3ForCausalLM._from_config(model.config.text_config, attn_implementation=first).train()
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.weight = model.lm_head.weight
    inputs = {name: value for name, value in data.items() if name != "labels"}
    logits = []
    for reader in (model, text):
        if attention == "flash":
            as_flash(reader)
        with ShiftedAttention(reader, 5).active():
            logits.append(reader(**inputs, use_cache=False).logits[real(data)])
    assert torch.equal(*logits) and bool(calls) == (attention == "flash")
    assert not torch.allclose(logits[0], model(**inputs, use_cache=False).logits[real(data)], atol=1e-3)


@pytest.mark.usefixtures("flex_runs_eagerly")
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_tokens_of_an_image_that_see_later_ones_are_refused(attention):
    model, ids = gemma3_with_vision(attention), tokens(1, 12)
    of_image = torch.zeros_like(ids)
    of_image[:, 3:7] = 1
    with (
        pytest.raises(ValueError, match="in this batch Gemma3ForConditionalGeneration lets tokens see later ones"),
        ShiftedAttention(model, 5).active(),
    ):
        model(ids, token_type_ids=of_image)


def test_a_finished_mask_from_elsewhere_is_refused():
    model, ids = tiny().train(), tokens(1, 6)
    with (
        pytest.raises(ValueError, match=r"needs an attention_mask \[batch, seq_len\] or None"),
        ShiftedAttention(model, 4).active(),
    ):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())


def test_attention_sinks_are_refused_where_heads_are_run_apart():
    config = GptOssConfig(**SHAPE, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="GptOssModel has attention sinks, .* train it without shifted attention"):
        ShiftedAttention(GptOssForCausalLM._from_config(config, attn_implementation="eager"), 4)
    ShiftedAttention(GptOssForCausalLM._from_config(config, attn_implementation="flex_attention"), 4)


def test_what_it_cannot_do_is_refused():
    for group in (1, 2.5, True):
        with pytest.raises(ValueError, match="group must be an integer of at least 2"):
            ShiftedAttention(tiny(), group)
    with pytest.raises(ValueError, match="two or more key-value heads"):
        ShiftedAttention(tiny(num_key_value_heads=1), 4)
    model = tiny().train()
    cache = model(tokens(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="trains on whole sequences"), ShiftedAttention(model, 4).active():
        model(tokens(1, 6), past_key_values=cache)


@pytest.mark.parametrize("family", ["stablelm", "nemotron", "doge"])
def test_families_whose_attention_the_groups_do_not_reach_are_refused(family):
    """Their layers would see the mask that is sent in place of a causal one, and late tokens with it."""
    with pytest.raises(ValueError, match="shifted attention needs attention that takes keyword arguments, and "):
        ShiftedAttention(deaf(family), 8)
