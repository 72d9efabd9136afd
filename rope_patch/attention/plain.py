"""Causal and sliding-window attention without n x n masks, for inference.

For layers with a sliding window, Transformers passes an n x n mask to SDPA. At 131072 tokens it takes 16 GiB, and
32 GiB more where it is added to scores in 16 bits; and all pairs of tokens are multiplied.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right

from rope_kernels.common.autocast import as_multiplied, multiplied_dtype

from ..families.attention_calls import (
    AttentionCall,
    attention_kernel,
    attention_name,
    sliding_window,
    watched_attention,
)
from ..forward.cache_arguments import cache_argument, returned_cache
from ..forward.state import has_view
from ..rope.rotary import find_base_model, find_decoder, forget_rows
from .masks import finished_mask
from .prefix import is_read_in_parts, kernels_for, prefix_attention
from .rounding import SAMPLES, differs_by_rounding
from .windowed import WindowedAttention, repeated


class NotPlainAttention(Exception):
    """A layer needs more than causal attention over all tokens or a window."""


def require_plain(call: AttentionCall) -> None:
    """Raise NotPlainAttention unless a layer needs only causal attention over all tokens or a window."""
    # an argument of the call comes before the module's attribute, as in Transformers' sdpa_attention_forward
    causal = call.options.get("is_causal")
    causal = getattr(call.module, "is_causal", True) if causal is None else causal
    if not causal or any(call.options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise NotPlainAttention


def last_hidden_states(
    causal_lm: Any, ids: torch.Tensor, watch: Callable[[AttentionCall], None] | None = None
) -> torch.Tensor:
    """Last hidden states, [batch, n, hidden], of ids [batch, n] without padding, without gradients.

    Rows longer than the model's sliding window are read without n x n masks, if the model runs SDPA under no RoPE view
    and gives the same states without them, which is checked once.

    Args:
        causal_lm: on one device or several.
        ids: of whole rows.
        watch: called with the attention of each layer before it runs. Without n x n masks, the call's mask is None and
            the layer's window is among its options.
    """
    config = causal_lm.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or ["sliding_attention"])  # Mistral has no layer_types
    has_windows = "sliding_attention" in types and types <= {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None) if has_windows else None
    if window and attention_kernel(causal_lm) == "sdpa" and ids.shape[1] > window and _is_plain(causal_lm, window):
        return _without_masks(causal_lm, ids, watch)
    with nullcontext() if watch is None else watched_attention(causal_lm, watch):
        return _plain_forward(causal_lm, ids)


def _plain_forward(causal_lm: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    forget_rows(causal_lm)
    states: torch.Tensor = find_base_model(causal_lm)(
        input_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return states


def _without_masks(
    causal_lm: Any, ids: torch.Tensor, watch: Callable[[AttentionCall], None] | None = None
) -> torch.Tensor:
    config = causal_lm.config.get_text_config(decoder=True)
    modules, windows = {id(module) for module in causal_lm.modules()}, Windows()

    def attend(call: AttentionCall) -> torch.Tensor | None:
        if id(call.module) not in modules:
            return None  # another model, in another thread
        require_plain(call)
        window = sliding_window(call, config)
        if watch is not None:
            watch(replace(call, mask=None, options={**call.options, "sliding_window": window}))
        return windows.attend(call, window)

    with watched_attention(causal_lm, attend):
        return _plain_forward(causal_lm, ids, finished_mask(1, ids.device))


# model -> (attention implementation, dtype of autocast) -> whether states are the same without masks
_checked: "WeakKeyDictionary[nn.Module, dict[tuple[str, torch.dtype | None], bool]]" = WeakKeyDictionary()


def _is_plain(causal_lm: Any, window: int) -> bool:
    """Whether rows beyond the window give the same states without masks: compares some once."""
    if has_view(find_decoder(causal_lm)):
        return False  # a view reads from the mask which tokens are padding
    weight = causal_lm.get_input_embeddings().weight
    checked, run = _checked.setdefault(causal_lm, {}), (attention_name(causal_lm), multiplied_dtype(weight.device))
    if run in checked:
        return checked[run]
    # [1, window + SAMPLES], spread over the vocabulary: 7919 is a prime
    ids = (7919 * torch.arange(1, window + SAMPLES + 1, device=weight.device) % weight.shape[0])[None]
    plain = _plain_forward(causal_lm, ids)[0, -SAMPLES:]  # [SAMPLES, hidden], of the tokens beyond the window
    base = find_base_model(causal_lm)
    try:
        # another correct way, which rounds otherwise: the window first, then the rest with a cache
        begun = base(input_ids=ids[:, :window], use_cache=True)
        known = base(input_ids=ids[:, window:], **cache_argument(base, returned_cache(begun)))
        unmasked = _without_masks(causal_lm, ids)[0, -SAMPLES:]
        checked[run] = differs_by_rounding(unmasked, plain, known.last_hidden_state[0])
    except torch.OutOfMemoryError:
        raise  # says nothing about the family
    except Exception:  # the family does not support it
        checked[run] = False
    return checked[run]


class Windows:
    """Attention of the last tokens of rows to all tokens before them, or to a window."""

    def __init__(self) -> None:
        self._windowed = WindowedAttention()

    def attend(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        """Output [batch, n, n_heads, value_dim] of a call whose queries are those of the last n tokens.

        Args:
            call: of a layer.
            window: most tokens that a query sees, itself included; None for all.
        """
        # under autocast rotated queries and keys are float32 and values are not; autocast casts them for SDPA alike
        q, k, v = map(as_multiplied, (call.query, call.key, call.value))
        if window is None or k.shape[2] <= window:
            with kernels_for(q, k):
                return _causal(q, k, v, call.scale).transpose(1, 2)
        return self._windowed(q, k, v, window, call.scale).transpose(1, 2)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last n tokens q to k and v, [batch, n_heads, n, value_dim].

    SDPA's `is_causal` would align the first query with the first key, and a mask would rule out flash attention.
    """
    n, n_keys = q.shape[2], k.shape[2]
    if q.is_cuda and 1 < n < n_keys:
        before, here = slice(n_keys - n), slice(n_keys - n, None)
        # two calls of the kernel for whole rows are faster than one call of a kernel that takes a bias
        if is_read_in_parts(q, k[:, :, here], v[:, :, here], scale):
            return prefix_attention(q, k[:, :, before], v[:, :, before], k[:, :, here], v[:, :, here], scale)
    grouped = False
    if q.is_cuda and q.shape[1] != k.shape[1]:
        # other kernels than flash attention repeat shared keys themselves, the slow one in full precision
        parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, True)
        grouped = torch.backends.cuda.can_use_flash_attention(parameters)
    if not grouped:
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    if n == n_keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    bias: Any = causal_lower_right(n, n_keys)
    out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)
    return out
