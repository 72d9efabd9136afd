"""Attention over a row and copies of its suffix, with the attention implementation of the model."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..families.attention_calls import AttentionCall, attention_kernel, sliding_window
from ..layout.two_view import TwoViewLayout
from .masks import additive_mask, block_mask
from .prefix import prefix_attention
from .sequences import Sequences, by_token, with_gaps
from .windowed import WindowedAttention


def copy_granule(causal_lm: nn.Module, seq_len: int) -> int:
    """Number of tokens that copies of a suffix should begin at multiples of.

    Under sdpa a 32nd of the row, so that lengths repeat: cuDNN's attention, which PyTorch runs on Hopper GPUs, takes
    tens to hundreds of milliseconds to plan for each new length. On average this adds a 64th of a row to the copies.
    """
    return max(1, seq_len // 32) if attention_kernel(causal_lm) == "sdpa" else 1


@dataclass(frozen=True)
class TwoViewAttention:
    """Attention of both views in one call of each layer's attention.

    - sdpa: a causal call for each document, and `prefix_attention` for its copies; sliding windows run in blocks
      (`WindowedAttention`).
    - flash: one call, in which documents and copies are sequences, the latter with gathered keys.
    - flex: a block mask, made once for each forward and window.
    - eager: an additive mask, made once for each forward and window.

    Windows count tokens, not RoPE indices.

    Args:
        layout: of the batch.
        causal_lm: the causal LM.
        config: of its decoder.
    """

    layout: TwoViewLayout
    causal_lm: nn.Module
    config: Any
    _masks: dict[Any, Any] = field(default_factory=dict)
    _windowed: WindowedAttention = field(default_factory=WindowedAttention)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Output [batch, n + m, n_heads, value_dim]."""
        window = sliding_window(call, self.config)
        kernel = attention_kernel(self.causal_lm)
        if kernel == "sdpa":
            n = self.layout.seen.shape[1]
            if all(segment.end - segment.begin == n for segment in self.layout.segments):
                return self._sdpa(call, window)
            # packed documents have many lengths: avoid cuDNN, which plans for each
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                return self._sdpa(call, window)
        if kernel == "flash":
            return self._sequences.attend(call, call.query, call.key, call.value)
        # layers differ by window, and an additive mask must have the dtype of the queries
        query, key = call.query, (window, call.query.dtype)
        if key not in self._masks and kernel == "flex":
            self._masks[key] = block_mask(
                lambda row, head, q, k: self.layout.visible(row, q, k, window), len(query), None, query
            )
        elif key not in self._masks:
            places = torch.arange(query.shape[2], device=query.device)
            rows = torch.arange(len(query), device=query.device)[:, None, None]
            visible = self.layout.visible(rows, places[:, None], places, window)  # [batch, n + m, n + m]
            self._masks[key] = additive_mask(visible, query.new_zeros(()))[:, None]
        return call.with_inputs(query, call.key, call.value, self._masks[key])

    def _sdpa(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        query, key, value = map(self._cut, (call.query, call.key, call.value))
        batch, n_heads, n_places, _ = call.query.shape
        outputs: dict[int, torch.Tensor] = {}
        for segment in self.layout.segments:
            # places of their first tokens among batch * (n + m)
            document, copies = segment.row * n_places + segment.begin, segment.row * n_places + segment.copy
            outputs[document] = self._windowed.causal(
                query[document], key[document], value[document], window, call.scale
            )
            if segment.split == segment.end:  # the view moves nothing, so there are no copies
                continue
            q, k, v = query[copies], key[copies], value[copies]
            before_k, before_v = (x[document][:, :, : segment.split - segment.begin] for x in (key, value))
            if window is None or window >= segment.end - segment.begin:
                outputs[copies] = prefix_attention(q, before_k, before_v, k, v, call.scale)
            else:  # a copy does not see the whole prefix, as it would in `prefix_attention`
                k, v = torch.cat([before_k, k], 2), torch.cat([before_v, v], 2)
                outputs[copies] = self._windowed.causal(q, k, v, window, call.scale)
        # for padding; in the dtype of an output, which autocast may have changed
        zeros, shape = next(iter(outputs.values()), call.value).new_zeros, (n_heads, call.value.shape[-1])
        # concatenated, because autograd would copy one large tensor for each piece written into it
        pieces = [
            outputs[place].squeeze(0).transpose(0, 1) if place in outputs else zeros(size, *shape)
            for place, size in self._sizes.items()
        ]
        return torch.cat(pieces).view(batch, n_places, *shape)

    def _cut(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        """Pieces [1, n_heads, n, head_dim] of [batch, n_heads, n + m, head_dim], by place.

        All come from one split, because the backward of each separate slice makes a whole tensor. They are views of
        [batch * (n + m), n_heads, head_dim], because cuDNN also plans for strides, and these do not depend on m.
        """
        pieces = by_token(x).split(list(self._sizes.values()))
        return {place: piece.transpose(0, 1)[None] for place, piece in zip(self._sizes, pieces, strict=True)}

    @cached_property
    def _sizes(self) -> dict[int, int]:
        """Sizes of documents, copies and the gaps between them by their place among batch * (n + m), in order."""
        n_places = self.layout.t.shape[1]
        sizes = {
            segment.row * n_places + segment.begin: segment.end - segment.begin for segment in self.layout.segments
        }
        sizes |= {
            segment.row * n_places + segment.copy: segment.end - segment.split
            for segment in self.layout.segments
            if segment.split < segment.end
        }
        return with_gaps(sizes, self.layout.t.numel())

    @cached_property
    def _sequences(self) -> Sequences:
        """A sequence for each document, and one for its copies, whose keys are its prefix and themselves."""
        n_places = self.layout.t.shape[1]
        queries: list[range] = []
        keys: list[tuple[range, ...]] = []
        for segment in self.layout.segments:
            row = segment.row * n_places
            document = range(row + segment.begin, row + segment.end)
            queries.append(document)
            keys.append((document,))
            if segment.end > segment.split:
                copies = range(row + segment.copy, row + segment.copy + segment.end - segment.split)
                queries.append(copies)
                keys.append((range(row + segment.begin, row + segment.split), copies))
        return Sequences.of(queries, keys, self.layout.t.device)
