"""Looking at every attention call of a model: queries, keys and values as the attention function gets them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Watch = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor | None]
"""(attention module, query [batch, n_heads, n, head_dim], key and value [batch, n_kv_heads, n, head_dim], after RoPE
and not repeated, keyword arguments of the call, from which it may take its own) -> None, or the attention's output
[batch, n, n_heads, head_dim], which then replaces the call."""


def attention_name(core: Any) -> str:
    """The attention implementation that the text decoder runs, e.g. "sdpa"."""
    return core.config.get_text_config(decoder=True)._attn_implementation


def softmax_scale(query: torch.Tensor, kwargs: dict[str, Any]) -> float:
    """What the scores of an attention call are multiplied by: its own scale, else head_dim ** -0.5."""
    scaling = kwargs.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


@contextmanager
def watched_attention(core: nn.Module, watch: Watch) -> Iterator[None]:
    """Call `watch` before every attention of models that run the implementation of `core`.

    Transformers keeps attention functions in one table for the process; the entry in use is wrapped under its own name,
    as other names would change how masks are built, and put back. Blocks nest. A backward that recomputes checkpointed
    layers has to run inside the block.
    """
    name = attention_name(core)
    before = ALL_ATTENTION_FUNCTIONS.get(name)

    def watching(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = watch(module, query, key, value, kwargs)
        if output is not None:
            return output, None
        run = before or sys.modules[type(module).__module__].eager_attention_forward
        return run(module, query, key, value, *args, **kwargs)

    local: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._local_mapping
    had, old = name in local, local.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = watching
    try:
        yield
    finally:
        if had:
            ALL_ATTENTION_FUNCTIONS[name] = old
        else:
            del ALL_ATTENTION_FUNCTIONS[name]
