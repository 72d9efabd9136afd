"""Watch every attention call of a model, with the arguments of the attention function."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..base.family_table import family_of


@dataclass(frozen=True)
class AttentionCall:
    """A call of a model's attention function.

    Args:
        module: the attention module.
        query: [batch, n_heads, n, head_dim], after RoPE.
        key: [batch, n_kv_heads, n, head_dim], after RoPE, not repeated.
        value: [batch, n_kv_heads, n, value_dim].
        mask: in the form of the implementation.
        options: keyword arguments; a watch may pop those meant for it.
        function: the attention function.
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
        """Factor of the scores, by default head_dim ** -0.5."""
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else scaling

    def with_inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> torch.Tensor:
        """Call the function with other inputs and further options; returns [batch, n, n_heads, value_dim]."""
        output: torch.Tensor = self.function(self.module, query, key, value, mask, **{**self.options, **options})[0]
        return output


Watch = Callable[[AttentionCall], torch.Tensor | None]
"""Called before attention. A tensor [batch, n, n_heads, value_dim] replaces its output; None lets it run."""


def attention_name(causal_lm: Any) -> str:
    """The attention implementation of the text decoder, e.g. "sdpa"."""
    return causal_lm.config.get_text_config(decoder=True)._attn_implementation


def attention_kernel(causal_lm: Any) -> str | None:
    """The kind of attention implementation, "flash", "sdpa", "flex" or "eager"; None for others."""
    name = attention_name(causal_lm)
    if name.startswith("flash_attention"):
        return "flash"
    return {"sdpa": "sdpa", "flex_attention": "flex", "eager": "eager"}.get(name)


def sliding_window(call: AttentionCall, config: Any) -> int | None:
    """Number of tokens that a query of this layer sees, with itself; None for all.

    Args:
        call: a call of the layer; most families pass the window in it.
        config: of the decoder, from which Transformers builds the masks of other families.
    """
    if "sliding_window" in call.options:
        window: int | None = call.options["sliding_window"]
        return window
    if family_of(config).sees_beyond_window:
        return None
    types = getattr(config, "layer_types", None)
    if types and types[call.module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


class _Watched:
    """The entry in the table of attention functions inside blocks of `watched_attention`.

    Args:
        function: the entry before; None for eager attention, which is not in the table.
        was_local: whether that entry was in the local mapping of the table.
    """

    def __init__(self, function: Callable[..., Any] | None, was_local: bool) -> None:
        self.function, self.was_local = function, was_local
        self.watches: tuple[Watch, ...] = ()  # of the open blocks, outermost first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._attend(self.watches, *args, **kwargs)

    def _attend(
        self,
        watches: tuple[Watch, ...],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the last watch; its `function` is attention with the other watches."""
        function: Callable[..., Any]
        if len(watches) > 1:
            function = partial(self._attend, watches[:-1])
        else:  # eager attention is a function in the module of each family
            function = self.function or sys.modules[type(module).__module__].eager_attention_forward
        if watches:
            output = watches[-1](AttentionCall(module, query, key, value, attention_mask, kwargs, function))
            if output is not None:
                return output, None  # no attention weights
        return function(module, query, key, value, attention_mask, **kwargs)


_TABLE = threading.Lock()  # held while a block opens or ends


@contextmanager
def watched_attention(causal_lm: nn.Module, watch: Watch) -> Iterator[None]:
    """Call `watch` before every attention of models with the attention implementation of `causal_lm`.

    Transformers has one table of attention functions per process. The entry in use is replaced under the same name,
    since masks are built by name, and restored at the end. Blocks nest, and the innermost sees a call first; they may
    end in any order, as in two threads. A backward that recomputes checkpointed layers must run inside the block.
    """
    name = attention_name(causal_lm)
    # the table's local mapping overrides its shared one: an entry that was not in it must be deleted at the end
    local: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._local_mapping
    with _TABLE:
        entry = local.get(name)
        watched = entry if isinstance(entry, _Watched) else _Watched(ALL_ATTENTION_FUNCTIONS.get(name), name in local)
        ALL_ATTENTION_FUNCTIONS[name] = watched
        watched.watches = (*watched.watches, watch)
    try:
        yield
    finally:
        with _TABLE:
            # the innermost, if one watch has several blocks
            last = max(i for i, other in enumerate(watched.watches) if other is watch)
            watched.watches = watched.watches[:last] + watched.watches[last + 1 :]
            # leave an entry that other code has written since
            if not watched.watches and local.get(name) is watched:
                if watched.was_local:
                    ALL_ATTENTION_FUNCTIONS[name] = watched.function
                else:
                    del ALL_ATTENTION_FUNCTIONS[name]
