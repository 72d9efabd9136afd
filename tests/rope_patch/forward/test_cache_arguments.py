"""The cache is found and handed over under either of its names."""

import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.families import tiny_family
from support.tiny import tiny, tokens
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import ModelOutput

from rope_patch.forward.cache_arguments import cache_argument, cache_of, has_paged_cache, returned_cache, tokens_in

NAMES = ("past_key_values", "cache")


class PagedCache:
    """What continuous batching hands over has such a name."""


class OlderModel(nn.Module):
    """A model whose code, as of one on the hub, has the older name."""

    def forward(self, input_ids, past_key_values=None):
        return past_key_values


class NewerModel(nn.Module):
    def forward(self, input_ids, cache=None):
        return cache


@pytest.mark.parametrize("name", NAMES)
def test_it_is_found_in_a_call(name):
    cache = DynamicCache()
    others = dict.fromkeys(NAMES)
    assert cache_of({**others, name: cache, "use_cache": True}) is cache  # an empty one counts
    assert cache_of(others) is None and cache_of({}) is None


@pytest.mark.parametrize("name", NAMES)
def test_one_in_pages_is_none(name):
    assert has_paged_cache({name: PagedCache()}) and cache_of({name: PagedCache()}) is None
    assert not has_paged_cache({name: DynamicCache()}) and not has_paged_cache({})


@pytest.mark.parametrize("name", NAMES)
def test_it_is_found_in_what_a_model_returns(name):
    cache = DynamicCache()
    assert returned_cache(ModelOutput({"logits": torch.zeros(1), name: cache})) is cache
    assert returned_cache((torch.zeros(1), cache)) is cache
    assert returned_cache(ModelOutput(logits=torch.zeros(1))) is None and returned_cache((torch.zeros(1),)) is None


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "minimax", "qwen3_next", "zamba2"])
@torch.no_grad()
def test_it_holds_as_many_tokens_as_were_read_whatever_the_first_layer_is(family):
    model, ids = tiny_family(family), tokens(2, 20)  # beyond the sliding window
    cache = returned_cache(model(ids, use_cache=True))
    assert tokens_in(cache) == 20
    model(ids[:, :1], position_ids=torch.full((2, 1), 20), **cache_argument(model, cache))
    assert tokens_in(cache) == 21


@torch.no_grad()
def test_one_of_a_fixed_size_holds_what_was_read():
    model = tiny()
    cache = StaticCache(config=model.config, max_cache_len=12)
    assert tokens_in(cache) == tokens_in(DynamicCache()) == tokens_in(None) == 0
    model(tokens(1, 7), past_key_values=cache)
    assert tokens_in(cache) == 7


def test_a_model_without_a_cache_in_what_it_returns(caplog):
    output = tiny()(tokens(1, 5), use_cache=False)
    assert returned_cache(output) is None
    assert "deprecated" not in caplog.text


def test_a_model_gets_it_by_the_name_that_it_knows():
    cache = DynamicCache()
    for model in (OlderModel(), NewerModel()):
        assert model(None, **cache_argument(model, cache)) is cache


def test_a_forward_that_something_else_has_put_on_a_model_counts():
    """Kernels of other packages stand in for the forward of one model, with the name that was theirs."""
    cache, model = DynamicCache(), NewerModel()
    model.forward = OlderModel.forward.__get__(model)
    assert model(None, **cache_argument(model, cache)) is cache


@pytest.mark.parametrize("wrapped", [False, True])
def test_decoding_goes_on_from_it(wrapped):
    model = tiny()
    if wrapped:  # whose forward names neither
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval()
        assert not set(NAMES) & set(inspect.signature(type(model).forward).parameters)
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(ids).logits[:, 6:]
        begun = model(ids[:, :6], use_cache=True)
        rest = model(ids[:, 6:], **cache_argument(model, returned_cache(begun)), use_cache=True)
    torch.testing.assert_close(rest.logits, expected, rtol=1e-5, atol=1e-5)
    assert returned_cache(rest) is returned_cache(begun)
