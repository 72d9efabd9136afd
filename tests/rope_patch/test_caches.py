"""KV caches that were filled under one view, or none, and are continued under another."""

import copy

import pytest
import torch
from support.tiny import tiny, tokens
from transformers import StaticCache

from rope_patch import patch_model, rope_view
from rope_patch.views import Cyclic, EndPrompt, PosAug, Skip

VIEW = Skip(split=4, skip=100)


@torch.no_grad()
def test_a_cache_filled_in_a_block_is_not_continued_by_a_model_without_hooks():
    model, ids = tiny(), tokens(1, 9)
    for block in ({"view": VIEW}, {"index": torch.arange(8)[None] * 3}):
        with rope_view(model, **block):
            cache = model(ids[:, :8], use_cache=True).past_key_values
        for held in (cache, copy.deepcopy(cache)):
            with pytest.raises(ValueError, match="past_key_values holds keys at"):
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
@pytest.mark.parametrize("view", [PosAug(low=2.0, high=2.0), Skip(split=5, skip=40)], ids=["posaug", "skip"])
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
@pytest.mark.parametrize(
    "select",
    [torch.tensor([True, False]), torch.tensor([1, 0]), torch.tensor([-1, 0])],
    ids=["bool", "index", "from the end"],
)
def test_rows_of_a_cache_are_chosen_by_name_and_by_bool(select):
    model, ids = tiny(), tokens(2, 9)
    with rope_view(model, Skip(), seed=2):
        cache = model(ids[:, :8], use_cache=True).past_key_values
        drawn = model.model._rope_patch.overrides.innermost().last.parameters["skip"].clone()
        reorders = select.dtype != torch.bool and (select >= 0).all()  # which takes no others
        (cache.reorder_cache if reorders else cache.batch_select_indices)(
            **{"beam_idx" if reorders else "indices": select}
        )
        assert torch.equal(cache._rope_patch_draws.parameters["skip"], drawn[select])
