"""LongLoRA's shifted sparse attention: in training, each head attends within groups of a document's tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..base.validators import require_integer
from ..families.attention_calls import (
    AttentionCall,
    attention_kernel,
    attention_name,
    sliding_window,
    watched_attention,
)
from ..families.capabilities import has_sinks, keeps_from_attention
from ..families.local_layers import other_layer_types
from ..forward.cache_arguments import cache_of
from ..layout.documents import real_tokens_of
from ..layout.labelled import Labelled
from ..rope.rotary import find_causal_lm, find_decoder, parameter_names
from .masks import additive_mask, block_mask, causal_band, finished_mask
from .sequences import Sequences, by_token, put_back

GROUPS = "shifted_attention_groups"
"""Name of the keyword argument that carries the groups of a forward through a model to its attention."""


class ShiftedAttention:
    """Inside `active()`, forwards in training mode attend within groups of `group` tokens of each document.

    A query at index t of its document sees the keys s <= t of its group. In the first half of the heads these have
    floor(t / g) = floor(s / g). In the second half, borders are h = floor(g / 2) tokens earlier:
    floor((t + g - h) / g) = floor((s + g - h) / g). The first group is then shorter. Groups do not wrap around, which
    would show late tokens to early ones. Forwards in evaluation mode attend to all tokens.

    Key-value heads are halved, each with its queries; of an odd number, the smaller half is shifted. Sliding windows
    apply too. Padding attends to nothing.

    Args:
        model: bare or wrapped, with attention by SDPA, eager, FlashAttention or flex attention.
        group: g, in tokens, at least 2.

    Raises:
        ValueError: another attention implementation, attention that keyword arguments do not reach, layers of other
            types, a single key-value head, attention sinks except with flex attention, or a group that is too short.

    Source: LongLoRA, arXiv:2309.12307, section 3.2, and the borders of its FlashAttention code.
    """

    def __init__(self, model: nn.Module, group: int) -> None:
        self.causal_lm: Any = find_causal_lm(model)
        self.decoder: Any = find_decoder(model)
        config = self.decoder.config
        require_integer("group", group, least=2)
        if attention_kernel(self.causal_lm) is None:
            raise ValueError(
                "shifted attention runs with sdpa, eager, flash and flex attention, got "
                f"{attention_name(self.causal_lm)!r}."
            )
        keeps = keeps_from_attention(self.decoder)
        if keeps is not None:  # each token would see all tokens before it
            raise ValueError(f"shifted attention needs attention that takes keyword arguments, and {keeps}.")
        if other := other_layer_types(config):
            raise ValueError(f"shifted attention is for attention layers, and this model has {other}.")
        if getattr(config, "num_key_value_heads", config.num_attention_heads) < 2:
            raise ValueError("shifted attention needs two or more key-value heads, of which it shifts a half.")
        if has_sinks(self.decoder) and attention_kernel(self.causal_lm) != "flex":  # which runs all heads in one call
            raise ValueError(
                f"shifted attention calls attention for each half of the heads, and {type(self.decoder).__name__} has "
                "attention sinks, which every call takes for all heads: train it without shifted attention, or on a "
                "GPU with attn_implementation='flex_attention'."
            )
        self.group = group
        self.parameters = parameter_names(self.decoder)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keep it open during forward and backward, which runs checkpointed layers again."""
        handle = self.decoder.register_forward_pre_hook(self._send_groups, with_kwargs=True)
        try:
            with watched_attention(self.causal_lm, self._attend):
                yield
        finally:
            handle.remove()

    def _send_groups(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not decoder.training:
            return None
        call = {**dict(zip(self.parameters, args, strict=False)), **kwargs}  # GPT-NeoX passes ids by position
        if cache_of(call) is not None:
            raise ValueError("shifted attention trains on whole sequences: call the model without a cache.")
        positions: Any = call.get("position_ids")
        if positions is not None and positions.ndim != 2:
            raise ValueError(
                "shifted attention needs position_ids of shape [batch, seq_len] or None, got "
                f"{tuple(positions.shape)}: with several axes (mRoPE) they do not say where documents begin."
            )
        mask: Any = call.get("attention_mask")
        if isinstance(mask, dict):  # one for each layer type, made by the model around the decoder
            if _sees_ahead(mask):
                raise ValueError(
                    f"shifted attention is causal, and in this batch {type(self.causal_lm).__name__} lets tokens see "
                    "later ones, as those of an image: train without shifted attention, or on text alone."
                )
            mask = real_tokens_of(mask)
        elif mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            raise ValueError("shifted attention needs an attention_mask [batch, seq_len] or None, not a finished one.")
        ids: Any = call.get("input_ids")
        if ids is None:
            embeds: Any = call["inputs_embeds"]
            ids = torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
        labelled = Labelled.of({"input_ids": ids, "position_ids": positions, "attention_mask": mask})
        groups = _Groups(labelled, self.group, eager=attention_kernel(self.causal_lm) == "eager")
        unused = finished_mask(len(ids), ids.device)
        return (), {**call, "attention_mask": unused, "use_cache": False, GROUPS: groups}

    def _attend(self, call: AttentionCall) -> torch.Tensor | None:
        groups: _Groups | None = call.options.pop(GROUPS, None)
        if groups is None:
            return None
        window = sliding_window(call, self.decoder.config)
        kernel = attention_kernel(self.causal_lm)
        if kernel == "flex":
            mask = groups.block_mask(call, window)
            return call.with_inputs(call.query, call.key, call.value, mask)
        n_kv_heads = call.key.shape[1]
        n_plain = n_kv_heads - n_kv_heads // 2  # key-value heads that are not shifted
        queries_per_key = call.query.shape[1] // n_kv_heads
        halves = []
        for shifted, heads in ((False, slice(0, n_plain)), (True, slice(n_plain, None))):
            query_heads = slice(0, n_plain * queries_per_key) if not shifted else slice(n_plain * queries_per_key, None)
            half = (call.query[:, query_heads], call.key[:, heads], call.value[:, heads])
            if kernel == "flash":
                halves.append(groups.sequences[shifted].attend(call, *half))
            else:
                halves.append(groups.attend(call, shifted, *half, window))
        return torch.cat(halves, 2)  # [batch, n, n_heads, value_dim]


def _sees_ahead(mask: Any) -> bool:
    """Whether a finished mask, or one of several by layer type, lets a token see later ones."""
    if isinstance(mask, dict):
        return any(map(_sees_ahead, mask.values()))
    if mask is None or len(mask.shape) == 2:  # FlashAttention's masks hold only padding
        return False
    if isinstance(mask, torch.Tensor):
        seen = mask if mask.dtype == torch.bool else mask == 0  # an additive mask is 0 where a query sees a key
        return bool(seen.triu(1).any())
    n_rows, _, n_queries, n_keys = mask.shape  # a BlockMask of FlexAttention
    device = mask.kv_num_blocks.device
    row = torch.arange(n_rows, device=device)[:, None, None]
    key = torch.arange(n_keys, device=device)
    for queries in torch.arange(n_queries, device=device)[:, None].split(512):  # not n x n numbers at once
        # [rows, queries, keys], of head 0
        seen = mask.mask_mod(row, torch.zeros_like(row), queries, key) & (key > queries)
        if seen.any():
            return True
    return False


class _Groups:
    """The groups of a batch's documents, and attention within them.

    Args:
        labelled: the batch.
        size: g, in tokens.
        eager: whether attention is eager, which needs a causal mask.
    """

    def __init__(self, labelled: Labelled, size: int, eager: bool) -> None:
        self.labelled, self.size, self.eager = labelled, size, eager
        self._masks: dict[Any, Any] = {}

    def attend(
        self,
        call: AttentionCall,
        shifted: bool,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """Output [batch, n, heads, value_dim] of a half of the heads, by one call for all groups of one length."""
        batch, _, n, _ = query.shape
        tensors = [by_token(x) for x in (query, key, value)]  # [batch n, heads, head_dim]
        outputs, places = [], []
        for place in self._places[shifted]:  # [groups, tokens]
            q, k, v = (x[place].transpose(1, 2) for x in tensors)  # [groups, heads, tokens, head_dim]
            mask = None
            if self.eager or (window is not None and window < place.shape[1]):
                mask_key = (place.shape[1], window, q.dtype)
                if mask_key not in self._masks:
                    band = causal_band(place.shape[1], place.shape[1], window or place.shape[1], q.device)[None, None]
                    self._masks[mask_key] = additive_mask(band, q.new_zeros(())) if self.eager else band
                mask = self._masks[mask_key]
            outputs.append(call.with_inputs(q, k, v, mask).flatten(0, 1))  # [groups tokens, heads, value_dim]
            places.append(place.flatten())
        return put_back(torch.cat(outputs), torch.cat(places), batch, n)

    def block_mask(self, call: AttentionCall, window: int | None) -> Any:
        """The mask of all heads for flex attention, made once for each forward and window."""
        n_heads, n_kv_heads = call.query.shape[1], call.key.shape[1]
        n_plain = (n_kv_heads - n_kv_heads // 2) * (n_heads // n_kv_heads)  # query heads that are not shifted
        labelled, n = self.labelled, self.labelled.t.shape[1]
        # group number of each token, without and with the shift; each token of padding is a group
        token = torch.arange(labelled.t.numel(), device=labelled.t.device).view_as(labelled.t)
        # a document has fewer than 2 n groups, so those of two documents never share a number
        moved = (labelled.t, labelled.t + self.size - self.size // 2)
        plain, shifted = (
            torch.where(labelled.valid, labelled.ordinal * 2 * n + x // self.size, -1 - token) for x in moved
        )

        def visible(row: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            distance = labelled.t[row, q] - labelled.t[row, k]  # in tokens
            together = plain[row, q] == plain[row, k], shifted[row, q] == shifted[row, k]
            seen = torch.where(head < n_plain, *together) & (distance >= 0)
            if window is not None:
                seen = seen & (distance < window)
            return seen

        key = (window, n_heads)
        if key not in self._masks:
            self._masks[key] = block_mask(visible, len(labelled.t), n_heads, call.query)
        return self._masks[key]

    @cached_property
    def _borders(self) -> dict[bool, list[tuple[int, int]]]:
        """By shifted: first place in the flattened batch and number of tokens of each group."""
        n, by_shift = self.labelled.t.shape[1], {}
        for shifted in (False, True):
            first = self.size // 2 if shifted else self.size  # tokens of the first group
            pairs = []
            for row, begin, length in self.labelled.spans:
                borders = [0, *range(first, length, self.size), length]
                pairs += [(row * n + begin + a, b - a) for a, b in zip(borders, borders[1:], strict=False)]
            by_shift[shifted] = pairs
        return by_shift

    @cached_property
    def _places(self) -> dict[bool, list[torch.Tensor]]:
        """By shifted: places of all groups of one length, [groups, tokens]."""
        device = self.labelled.t.device
        places = {}
        for shifted, pairs in self._borders.items():
            begins: dict[int, list[int]] = {}
            for begin, length in pairs:
                begins.setdefault(length, []).append(begin)
            places[shifted] = [
                torch.tensor(begin, device=device)[:, None] + torch.arange(length, device=device)
                for length, begin in begins.items()
            ]
        return places

    @cached_property
    def sequences(self) -> dict[bool, Sequences]:
        """By shifted: the groups as sequences for FlashAttention, which gets windows from its call."""
        sequences = {}
        for shifted, pairs in self._borders.items():
            groups = [range(begin, begin + length) for begin, length in pairs]
            sequences[shifted] = Sequences.of(groups, [(group,) for group in groups], self.labelled.t.device)
        return sequences
