"""Families that differ from Llama in where and how often RoPE is called: a view is right there, or refused by name."""

import copy

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from support.families import tiny_family
from support.tiny import gemma3, tiny, tokens
from torch.nn.attention.flex_attention import create_block_mask
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from rope_patch import describe, native_rope, patch_model, rope_view
from rope_patch.base.draws import DrawKey
from rope_patch.eval.measures.subject import Subject
from rope_patch.forward.drawn_view import DrawnView
from rope_patch.layout.documents import Documents, real_tokens_of
from rope_patch.losses import SelfDistiller, ViewConsistency
from rope_patch.views import RPE, ChunkPermute, EndPrompt, Skip

L = 20


def test_rope_inside_layers_works_but_not_under_checkpointing():
    model = tiny_family("recurrent_gemma")
    ids = tokens(1, L)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with rope_view(model, "standard"):
            assert torch.equal(model(ids, use_cache=False).logits, plain)
        with rope_view(model, Skip(split=9, skip=30)):
            seen = model(ids, use_cache=False).logits
    torch.testing.assert_close(seen[:, :9], plain[:, :9], rtol=1e-4, atol=1e-5)
    assert not torch.equal(seen[:, 9:], plain[:, 9:])
    with pytest.raises(ValueError, match="needs the context window of pretraining"):
        patch_model(model, "pi", factor=2.0)
    assert "not stated by the config" in str(describe(model))
    patch_model(model, "skip").train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="applies RoPE inside its layers, which gradient checkpointing runs again"):
        model(ids, labels=ids, use_cache=False)


@torch.no_grad()
def test_prompt_tuning_lengthens_the_row_before_the_view_sees_it():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    torch.manual_seed(3)
    wrapped = get_peft_model(tiny(), config).eval()
    ids = tokens(2, L)
    prompts = wrapped.get_prompt(batch_size=2)
    embeddings = torch.cat([prompts, wrapped.get_input_embeddings()(ids)], 1)
    index = torch.arange(L + 4)
    index[9:] += 30
    with rope_view(wrapped, Skip(split=9, skip=30)):
        seen = wrapped(ids, use_cache=False).logits
    base = tiny()
    with rope_view(base, index=index[None]):
        expected = base(inputs_embeds=embeddings, use_cache=False).logits
    torch.testing.assert_close(seen[:, -L:], expected[:, -L:], rtol=1e-4, atol=1e-5)
    assert describe(wrapped).model == "LlamaForCausalLM"


@pytest.mark.parametrize("shape", [(1, L), (3, L), (4, 3, L)], ids=["1,S", "B,S", "axes,B,S"])
def test_a_view_is_elementwise_in_the_positions(shape):
    """What makes it right for shared rows, own rows, several axes, single decoded tokens and shards of a row."""
    documents = Documents(torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), L), torch.arange(3)[:, None])
    view = Skip()
    bound = DrawnView(view, documents, view.draw(documents.length, DrawKey(0, torch.tensor(0), documents.ordinal)))
    whole = bound(torch.arange(L).expand(3, L))
    indices = bound(torch.arange(L).expand(shape))
    assert torch.equal(indices, whole.expand(indices.shape))
    shard = torch.tensor([3, 4, 15, 16])  # of context parallelism: not in order
    assert torch.equal(bound(shard.expand(3, 4)), whole[:, shard])


def phimoe(**rope):
    config = copy.copy(tiny_family("phimoe").config)
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default", **rope}
    return type(tiny_family("phimoe"))(config).eval()


def test_frequencies_that_are_worked_out_in_every_forward_cannot_be_replaced_for_one():
    model = phimoe()
    with pytest.raises(ValueError, match="PhimoeRotaryEmbedding works its frequencies out from the config"):
        patch_model(model, "random-base")
    patch_model(model, "abf", theta=1e6)
    with pytest.raises(ValueError, match="cannot be put in force for a while"), native_rope(model):
        pass
    assert "not possible    native_rope: PhimoeRotaryEmbedding" in str(describe(model))
    long = phimoe(
        rope_type="longrope",
        short_factor=[1.0] * 8,
        long_factor=[4.0] * 8,
        short_mscale=1.0,
        long_mscale=1.2,
        original_max_position_embeddings=32,
    )
    with pytest.raises(ValueError, match="A view with 'longrope' would change these"), rope_view(long, Skip()):
        pass


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_is_found_in_masks_that_are_finished(attention, side):
    """A multimodal model gives its text decoder a mask for each layer type: a view finds its documents there."""
    model, ids = gemma3(), tokens(2, L)
    model.set_attn_implementation(attention)
    n = 13
    real = slice(L - n, L) if side == "left" else slice(0, n)
    mask = torch.zeros(2, L, dtype=torch.long)
    mask[0], mask[1, real] = 1, 1
    view = ChunkPermute(blocks=3)  # moves by the length of the document
    options = {"config": model.config, "inputs_embeds": torch.zeros(2, L, 32), "past_key_values": None}
    finished = {
        "full_attention": create_causal_mask(attention_mask=mask, **options),
        "sliding_attention": create_sliding_window_causal_mask(attention_mask=mask, **options),
    }
    with rope_view(model, view):
        expected = model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    with rope_view(model, view):
        actual = model.model(ids, attention_mask=finished, use_cache=False).last_hidden_state
    torch.testing.assert_close(actual[1, real], expected[1, real])
    torch.testing.assert_close(actual[0], expected[0])


def test_finished_masks_of_flex_attention():
    def real(batch, head, q, k):
        return (q >= k) & ((k >= 5) | (batch == 0))

    mask = create_block_mask(real, 2, None, L, L, device="cpu")
    assert real_tokens_of({"full_attention": mask}).tolist() == [[True] * L, [False] * 5 + [True] * (L - 5)]


def test_a_head_of_more_than_one_product_is_refused_where_losses_take_hidden_states():
    model = patch_model(tiny_family("modernbert-decoder"), "skip")
    with pytest.raises(ValueError, match=r"ModernBertDecoderPredictionHead\) between the decoder and the output head"):
        SelfDistiller(model, ViewConsistency())
    with pytest.raises(ValueError, match="between the decoder and the output head"):
        Subject(model)


@torch.no_grad()
def test_explicit_indices_reach_compressed_keys():
    """DeepSeek-V4 compresses windows of 4 tokens: their keys get the index of the window's first token."""
    model, ids = tiny_family("deepseek_v4").eval(), tokens(2, L)
    plain = model(ids, use_cache=False).logits
    with rope_view(model, index=torch.arange(L)[None]):
        assert torch.equal(model(ids, use_cache=False).logits, plain)
    index = torch.arange(L)
    index[7:] += 30
    with rope_view(model, Skip(split=7, skip=30)):
        expected = model(ids, use_cache=False).logits
    assert (expected - plain).abs().max() > 0.1
    with rope_view(model, index=index[None]):
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        out = model(ids[:, :9], use_cache=True)
        parts = [out.logits]
        for t in range(9, L):  # the token at 11, 15 and 19 ends a window
            parts.append(model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "view", [Skip(split=7, skip=30), Skip(), EndPrompt(target=60, cue_tokens=3), RPE(max_index=64)], ids=repr
)
def test_compressed_keys_take_positions_of_one_document_a_row(view):
    """As `generate` gives them."""
    model, ids = tiny_family("deepseek_v4").eval(), tokens(2, L)
    with rope_view(model, view, seed=3):
        expected = model(ids, use_cache=False).logits
    for positions in (torch.arange(L)[None], torch.arange(L).repeat(2, 1)):
        with rope_view(model, view, seed=3):
            assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, expected)
    with rope_view(model, view, seed=3):
        actual = model.generate(ids, max_new_tokens=1, do_sample=False)
    assert torch.equal(actual[:, -1], expected[:, -1].argmax(-1))


@torch.no_grad()
@pytest.mark.parametrize("length", [4, L])
def test_compressed_keys_of_packed_documents_are_refused(length):
    model, half = tiny_family("deepseek_v4").eval(), torch.arange(length // 2)
    packed = {"position_ids": torch.cat([half, half])[None], "use_cache": False}
    with rope_view(model, "skip"), pytest.raises(ValueError, match="needs one document a row"):
        model(tokens(1, length), **packed)
