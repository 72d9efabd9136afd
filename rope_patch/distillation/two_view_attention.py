"""Attention over a row and copies of its suffix, by the attention implementation that the model runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right

from ..attention_calls import AttentionCall, attention_kernel, sliding_window
from .one_pass import Segment, TwoViewLayout


@dataclass(frozen=True)
class TwoViewAttention:
    """Attention of both views in one call of each layer's attention.

    - sdpa: a causal call for each document, and one for its copies over prefix and copies; a layer's sliding window
      takes a mask of the document, as it does without us.
    - flash: one call with as many sequences, keys of copies gathered; masks end at the last key.
    - flex: a block mask, made once a forward and window.
    - eager: an additive mask, likewise.

    Windows count tokens, whatever their RoPE indices.

    Args:
        layout: of the batch.
        core: the causal LM.
        config: of its decoder.
    """

    layout: TwoViewLayout
    core: nn.Module
    config: Any
    _masks: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Output [batch, n + m, n_heads, value_dim]."""
        window = sliding_window(call, self.config)
        kernel = attention_kernel(self.core)
        if kernel == "sdpa":
            return self._sdpa(call, window)
        if kernel == "flash":
            return self._flash(call)
        make = self._block_mask if kernel == "flex" else self._additive_mask
        key = (window, call.query.dtype)
        if key not in self._masks:
            self._masks[key] = make(call.query, window)
        return call.with_inputs(call.query, call.key, call.value, self._masks[key])

    def _sdpa(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        shared = call.query.shape[1] != call.key.shape[1]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            """Bottom-right causal attention within the window."""
            n_queries, n_keys = query.shape[2], key.shape[2]
            mask: Any = None if n_queries == n_keys else causal_lower_right(n_queries, n_keys)
            if window is not None and window < n_keys:
                mask = self._band(n_queries, n_keys, window, query.device)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=call.scale, enable_gqa=shared
            )

        tensors = (call.query, call.key, call.value)
        pieces: list[list[tuple[int, torch.Tensor]]] = [[] for _ in call.query]
        for one in self.layout.segments:
            row, whole = slice(one.row, one.row + 1), slice(one.begin, one.end)
            pieces[one.row].append((one.begin, attend(*(x[row, :, whole] for x in tensors))))
        for one in self.layout.segments:
            n_copies = one.end - one.split
            if n_copies:
                row, copies = slice(one.row, one.row + 1), slice(one.copy, one.copy + n_copies)
                k, v = (torch.cat([x[row, :, one.begin : one.split], x[row, :, copies]], 2) for x in tensors[1:])
                pieces[one.row].append((one.copy, attend(call.query[row, :, copies], k, v)))
        # joined, not written into one tensor: autograd would copy all of it for each piece
        like = call.query[:1, :, :, : call.value.shape[-1]]
        return torch.cat([_joined(row, like) for row in pieces]).transpose(1, 2).contiguous()

    def _band(self, n_queries: int, n_keys: int, window: int, device: torch.device) -> torch.Tensor:
        key = (n_queries, n_keys, window)
        if key not in self._masks:
            distance = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(
                n_keys, device=device
            )
            self._masks[key] = (distance >= 0) & (distance < window)
        mask: torch.Tensor = self._masks[key]
        return mask

    def _flash(self, call: AttentionCall) -> torch.Tensor:
        one = self._sequences
        batch, n_heads, n_places, _ = call.query.shape

        def gathered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2).flatten(0, 1)[places].transpose(0, 1)[None]

        found = call.with_inputs(
            gathered(call.query, one.queries),
            gathered(call.key, one.keys),
            gathered(call.value, one.keys),
            None,
            position_ids=None,
            cu_seq_lens_q=one.query_ends,
            cu_seq_lens_k=one.key_ends,
            max_length_q=one.longest_query,
            max_length_k=one.longest_key,
        )[0]
        output = found.new_zeros(batch * n_places, n_heads, found.shape[-1])
        return output.index_copy(0, one.queries, found).view(batch, n_places, n_heads, -1)

    @cached_property
    def _sequences(self) -> "_Sequences":
        return _Sequences.of(self.layout)

    def _block_mask(self, query: torch.Tensor, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        n_rows, _, n_places, _ = query.shape
        visible = self._mask_function(window)
        on_gpu = query.device.type == "cuda"  # elsewhere compiling takes longer than it saves
        return create_block_mask(
            lambda row, head, q, k: visible(row, q, k),
            n_rows,
            None,
            n_places,
            n_places,
            device=str(query.device),
            _compile=on_gpu,
        )

    def _additive_mask(self, query: torch.Tensor, window: int | None) -> torch.Tensor:
        places = torch.arange(query.shape[2], device=query.device)
        rows = torch.arange(len(query), device=query.device)[:, None, None]
        visible = self._mask_function(window)(rows, places[:, None], places)
        lowest = torch.finfo(query.dtype).min
        return torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, lowest)[:, None]

    def _mask_function(self, window: int | None) -> Callable[..., torch.Tensor]:
        return lambda row, q, k: self.layout.visible(row, q, k, window)


@dataclass(frozen=True)
class _Sequences:
    """A layout as FlashAttention's sequences: each document, and its copies over its prefix and themselves.

    Args:
        queries: places among the flattened batch * (n + m), in the order of the sequences.
        keys: likewise.
        query_ends: int32, 0 and where each sequence ends among `queries`.
        key_ends: int32, among `keys`.
        longest_query: tokens of the longest sequence.
        longest_key: likewise.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, layout: TwoViewLayout) -> "_Sequences":
        n_places = layout.t.shape[1]
        queries: list[range] = []
        keys: list[tuple[range, ...]] = []
        for one in layout.segments:
            row = one.row * n_places
            document = range(row + one.begin, row + one.end)
            queries.append(document)
            keys.append((document,))
            if one.end > one.split:
                copies = _copies(one, row)
                queries.append(copies)
                keys.append((range(row + one.begin, row + one.split), copies))
        device = layout.t.device
        n_queries = [len(q) for q in queries]
        n_keys = [sum(len(part) for part in parts) for parts in keys]
        return cls(
            _places(queries, device),
            _places([part for parts in keys for part in parts], device),
            _ends(n_queries, device),
            _ends(n_keys, device),
            max(n_queries),
            max(n_keys),
        )


def _copies(one: Segment, row: int) -> range:
    return range(row + one.copy, row + one.copy + one.end - one.split)


def _places(parts: list[range], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])


def _ends(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _joined(pieces: list[tuple[int, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Pieces [1, n_heads, n, head_dim] at their rising places, zeros between them, in the shape of `like`."""
    parts, place = [], 0
    for begin, piece in [*pieces, (like.shape[2], like[:, :, :0])]:
        parts += [like.new_zeros(*like.shape[:2], begin - place, like.shape[3]), piece]
        place = begin + piece.shape[2]
    return torch.cat(parts, 2)
