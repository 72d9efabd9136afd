"""KV caches that were filled under one view, or none, and are continued under another."""

import copy

import pytest
import torch
from support import cells
from support.families import tiny_family
from support.tiny import tiny, tokens
from transformers import StaticCache

from rope_patch import patch_model, rope_view
from rope_patch.patch import view_source
from rope_patch.views import Cyclic, Dilation, EndPrompt, PosAug, Skip, Uniform

VIEW = Skip(split=4, skip=100)


@torch.no_grad()
def test_a_cache_filled_in_a_block_is_not_continued_by_a_model_without_hooks():
    model, ids = tiny(), tokens(1, 9)
    for block in ({"view": VIEW}, {"index": torch.arange(8)[None] * 3}):
        with rope_view(model, **block):
            cache = model(ids[:, :8], use_cache=True).past_key_values
        for held in (cache, copy.deepcopy(cache)):
            with pytest.raises(ValueError, match="the cache holds keys at"):
                model(ids[:, 8:], past_key_values=held)
        assert not model.model._forward_pre_hooks
        cache.reset()
        assert cache.get_seq_length() in (0, 8)  # a dynamic one keeps its length and zeros its keys
    with rope_view(model, VIEW):
        cache = model(ids[:, :8], use_cache=True).past_key_values
    with rope_view(model, VIEW):  # the block may end between forwards
        actual = model(ids[:, 8:], past_key_values=cache).logits[:, -1]
        expected = model(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["minimax", "lfm2_moe", "qwen3_next"])
@torch.no_grad()
def test_where_the_first_layer_keeps_no_keys_tokens_are_decoded_all_the_same(family):
    model, ids, new = tiny_family(family), tokens(1, 20), 8
    index = 3 * torch.arange(20 + new)[None]
    for moved in ({"index": index}, {"view": VIEW}):
        with rope_view(model, **moved):
            written = model.generate(
                ids, max_new_tokens=new, do_sample=False, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            whole = model(written.sequences, use_cache=False).logits[:, 19:-1]
            cache = model(ids, use_cache=True).past_key_values
        torch.testing.assert_close(torch.stack(written.logits, 1), whole, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="the cache holds keys at"):
            model(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[20]]))


@torch.no_grad()
def test_an_index_table_is_continued_over_a_cache():
    """Each row by its own indices, from the column behind what the cache holds on, one token at a time or several."""
    model, ids = tiny(), tokens(2, 12)
    index = torch.stack([torch.arange(12) * 3, torch.arange(12) + 40 * (torch.arange(12) > 4)])
    with rope_view(model, index=index):
        whole = model(ids, use_cache=False).logits
        cache = model(ids[:, :6], use_cache=True).past_key_values
        parts = [model(ids[:, i:j], past_key_values=cache).logits for i, j in ((6, 7), (7, 8), (8, 12))]
        message = r"index must be \[batch, seq_len\] .* got \(2, 12\) for 2 rows and tokens 0 to 13"
        with pytest.raises(ValueError, match=message):
            model(tokens(2, 13), use_cache=False)
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 6:], rtol=1e-4, atol=1e-4)
    assert (whole - model(ids).logits).abs().max() > 0.1


@torch.no_grad()
def test_views_and_tables_do_not_continue_each_other():
    model, ids = patch_model(tiny(), "standard"), tokens(1, 9)
    with rope_view(model, index=torch.arange(9)[None] * 3):
        cache = model(ids[:, :8], use_cache=True).past_key_values
    with rope_view(model, VIEW), pytest.raises(ValueError, match="explicit indices"):
        model(ids[:, 8:], past_key_values=cache)
    with pytest.raises(ValueError, match="explicit indices"):
        model(ids[:, 8:], past_key_values=cache)
    with rope_view(model, VIEW):
        cache = model(ids[:, :8], use_cache=True).past_key_values
    with rope_view(model, index=torch.arange(9)[None] * 3), pytest.raises(ValueError, match="explicit indices are"):
        model(ids[:, 8:], past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("view", [PosAug(2.0), Skip(split=5, skip=40)], ids=["posaug", "skip"])
def test_a_left_padded_cache_without_a_view_is_continued_at_the_right_index(view):
    """As of prefix tuning, the prefix is at true positions, and begins the document."""
    model, ids = patch_model(tiny(), "standard"), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = model(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], use_cache=True).past_key_values
    with rope_view(model, view):
        actual = model(ids[:, 8:], attention_mask=mask, position_ids=positions[:, 8:], past_key_values=cache).logits
        source = model.model._rope_patch.overrides.innermost()
        assert source.last.documents.start[:, -1].tolist() == [0, 0]
        assert source.last.documents.length[:, -1].tolist() == [7, 12]
    alone = model(ids[:1, 5:8], use_cache=True).past_key_values
    with rope_view(model, view):
        expected = model(ids[:1, 8:], past_key_values=alone, position_ids=positions[:1, 8:]).logits
    torch.testing.assert_close(actual[:1], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("view", [Cyclic(shift=3), Skip(), EndPrompt(target=50, cue_tokens=3)], ids=lambda v: v.name)
def test_a_mask_of_the_length_of_a_static_cache_moves_nothing(view):
    model, ids = tiny(), tokens(1, 8)
    with rope_view(model, view):
        expected = model(ids, use_cache=False).logits
    with rope_view(model, view):
        mask = torch.zeros(1, 20, dtype=torch.long)
        mask[:, :8] = 1
        cache = StaticCache(config=model.config, max_cache_len=20)
        actual = model(ids, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_prompt_in_chunks_is_refused():
    model, ids = tiny(), tokens(1, 12)
    with rope_view(model, Cyclic()), pytest.raises(ValueError, match="prefill_chunk_size"):
        model.generate(ids, max_new_tokens=2, prefill_chunk_size=4)
    with rope_view(model, Cyclic()):
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 14)


@torch.no_grad()
def test_continuous_batching_is_refused():
    class PagedCache:
        def get_seq_length(self):
            return 0

    model, ids = tiny(), tokens(1, 12)
    with rope_view(model, Skip()), pytest.raises(ValueError, match="generate_batch"):
        model.model(ids, cache=PagedCache())


@torch.no_grad()
def test_a_cache_keeps_the_draws_that_filled_it():
    """Another forward in between, and rows that change places, as those of beams do."""
    model, case = tiny(), cells.CASES["per-layer"]
    cell, other = cells.cell("cached"), cells.cell("plain")
    ids = cell.inputs["input_ids"]
    with rope_view(model, case.view, seed=5):
        whole = cells.run(model, cell)
    with rope_view(model, case.view, seed=5):
        out = model(ids[:, :9], use_cache=True)
        cache = out.past_key_values
        model(**other.inputs, use_cache=False)
        model(other.inputs["input_ids"], use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(ValueError, match="continues with the 2 rows that filled the cache, got 1 rows"):
            model(ids[:1, 9:], past_key_values=cache, use_cache=True)
        logits = model(ids[:, 9:].flip(0), past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits.flip(0), whole[:, 9:], rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(cache)
    with rope_view(model, case.view, seed=8):
        following = [model(ids[:, :1], past_key_values=c, use_cache=True).logits for c in (cache, twin)]
    assert torch.equal(*following)


@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_select_indices", torch.tensor([-1, 0]), [2, 0]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ],
)
@torch.no_grad()
def test_draws_go_where_the_rows_of_their_cache_go(method, argument, rows):
    model, ids = tiny(), tokens(3, 12)
    actual = []
    for moves in (False, True):
        with rope_view(model, Skip(skip=Uniform(1, 40)), seed=5):  # each row has a draw of its own
            cache = model(ids[:, :9], use_cache=True).past_key_values
            if moves:
                getattr(cache, method)(argument)
            following = ids[rows if moves else slice(None), 9:]
            actual.append(model(following, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(actual[1], actual[0][rows], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_cache_of_another_view_is_refused():
    model, ids = tiny(), tokens(1, 9)
    with rope_view(model, Skip(split=4, skip=9)):
        cache = model(ids, use_cache=True, return_dict=False)[1]
    with rope_view(model, PosAug()), pytest.raises(ValueError, match="the cache holds keys at the RoPE indices"):
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_cache_of_a_view_is_refused_without_one():
    model, ids = patch_model(tiny(), "pi", factor=2.0), tokens(1, 9)
    with rope_view(model, Skip(split=4, skip=9)):
        cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="Skip.*and no view is in force now"):
        model(ids[:, :1], past_key_values=cache)
    cache.crop(-9)
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits), "an emptied cache is a new one"
    model(ids[:, :1], past_key_values=cache)
    with rope_view(model, "standard"):
        cache = model(ids, use_cache=True).past_key_values
    model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_static_cache_and_padding_have_the_draws_of_a_dynamic_one():
    """generate hands over finished masks then, of more keys than there are tokens."""
    model, ids = tiny().eval(), tokens(2, 12)
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    patch_model(model, Dilation(), seed=5, when="always")
    drawn = []
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        view_source(model).clock.set(3, 0)
        written = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0, **options)
        last = view_source(model).last
        drawn.append((written.tolist(), int(last.documents.ordinal.max()), last.parameters["factor"].unique().tolist()))
    assert drawn[0] == drawn[1] and drawn[0][1] == 1
