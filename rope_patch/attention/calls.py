"""Looking at every attention call of a model: queries, keys and values as the attention function gets them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# the config has a window that no mask keeps to: the KV cache alone is cut to it, and in a forward without one, as in
# training, each query sees all tokens before it
_SEES_BEYOND_WINDOW = ("moshi",)


@dataclass(frozen=True)
class AttentionCall:
    """A call of a model's attention function.

    Args:
        module: the attention module.
        query: [batch, n_heads, n, head_dim], after RoPE.
        key: [batch, n_kv_heads, n, head_dim], after RoPE, not repeated.
        value: [batch, n_kv_heads, n, value_dim].
        mask: as the implementation takes it.
        options: keyword arguments, from which a watch may take its own.
        function: the attention function itself.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    options: dict[str, Any]
    function: Callable[..., Any]

    @property
    def scale(self) -> float:
        """What the scores are multiplied by: the call's own scale, else head_dim ** -0.5."""
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else scaling

    def with_inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> torch.Tensor:
        """The function's output [batch, n, n_heads, value_dim] for other tensors, another mask, other options."""
        output: torch.Tensor = self.function(self.module, query, key, value, mask, **{**self.options, **options})[0]
        return output


Watch = Callable[[AttentionCall], torch.Tensor | None]
"""What it returns, [batch, n, n_heads, value_dim], replaces the call's output; None lets the call run."""


def attention_name(causal_lm: Any) -> str:
    """The attention implementation that the text decoder runs, e.g. "sdpa"."""
    return causal_lm.config.get_text_config(decoder=True)._attn_implementation


def attention_kernel(causal_lm: Any) -> str | None:
    """The kind of that implementation, "flash", "sdpa", "flex" or "eager"; None for others."""
    name = attention_name(causal_lm)
    if name.startswith("flash_attention"):
        return "flash"
    return {"sdpa": "sdpa", "flex_attention": "flex", "eager": "eager"}.get(name)


def sliding_window(call: AttentionCall, config: Any) -> int | None:
    """Most tokens back that a query of this layer sees, itself counted; None for all.

    Args:
        call: of the layer, which most families give the window.
        config: of the decoder, by whose rule Transformers makes masks for those that do not.
    """
    if "sliding_window" in call.options:
        window: int | None = call.options["sliding_window"]
        return window
    if config.model_type in _SEES_BEYOND_WINDOW:
        return None
    types = getattr(config, "layer_types", None)
    if types and types[call.module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


@contextmanager
def watched_attention(causal_lm: nn.Module, watch: Watch) -> Iterator[None]:
    """Call `watch` before every attention of models that run the implementation of `causal_lm`.

    Transformers keeps attention functions in one table for the process; the entry in use is wrapped under its own name,
    as other names would change how masks are built, and put back. Blocks nest. A backward that recomputes checkpointed
    layers has to run inside the block.
    """
    name = attention_name(causal_lm)
    before = ALL_ATTENTION_FUNCTIONS.get(name)

    def watching(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        # eager attention is in no table: each family's module has a function of that name
        function = before or sys.modules[type(module).__module__].eager_attention_forward
        output = watch(AttentionCall(module, query, key, value, attention_mask, kwargs, function))
        return function(module, query, key, value, attention_mask, **kwargs) if output is None else (output, None)

    # the table's own layer, above what the process shares: what was not in it before must not stay behind
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
