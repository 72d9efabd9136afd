"""The key-value cache among the arguments of a call and in what a model returns.

Transformers 5.24 renamed `past_key_values` to `cache`. Models accept the old name until 5.40, and remote code
may for longer.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

_NAMES = ("past_key_values", "cache")


def cache_of(call: Mapping[str, Any]) -> Any:
    """The cache that a call reads and fills; None without one, and for the paged cache of continuous batching."""
    return next((call[name] for name in _NAMES if call.get(name) is not None and not _is_paged(call[name])), None)


def has_paged_cache(call: Mapping[str, Any]) -> bool:
    """Whether a call has the paged cache of continuous batching."""
    return any(_is_paged(call.get(name)) for name in _NAMES)


def tokens_in(cache: Any) -> int:
    """Tokens in a cache, from the first layer that has any; 0 for no cache.

    A hybrid's first layer may keep a state instead of keys, and MiniMax's cache reports 0 tokens for it.
    """
    for layer in getattr(cache, "layers", () if cache is None else (cache,)):
        length = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
        if length:
            return int(length)
    return 0


def returned_cache(output: Any) -> Any:
    """The cache that a model returned: a field, or among the values of return_dict=False; None if there is none."""
    if isinstance(output, tuple):
        return next((x for x in output if isinstance(x, Cache)), None)
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    # not getattr: outputs of 5.24 warn when asked for the old name
    return next((value for name, value in fields.items() if name in _NAMES and value is not None), None)


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The argument by which `model` takes a cache: {its name: cache}."""
    parameters = inspect.signature(model.forward).parameters
    if not any(name in parameters for name in _NAMES):  # a wrapper with **kwargs
        parameters = inspect.signature(create_causal_mask).parameters
    return {next(name for name in _NAMES if name in parameters): cache}


def _is_paged(cache: Any) -> bool:
    return "Paged" in type(cache).__name__
