"""Two views in one forward: the tokens, and once more those behind the first index that the view changes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right

from ..attention_calls import attention_name
from .labelled import Labelled


@dataclass(frozen=True)
class Segment:
    """A document of a row, [begin, end), the first token that the view moves, and where its copy begins."""

    row: int
    begin: int
    split: int
    end: int
    copy: int


@dataclass(frozen=True)
class TwoViewLayout:
    """A batch [batch, n] with copies of suffixes behind it, [batch, n + m].

    Copies attend to the prefix of their document and to each other, causally; nothing else attends to them. The hidden
    states of a prefix are the same under both views, so that one forward gives both, and gradients of either flow
    through the same prefix: they are those of two passes.

    Args:
        segments: one a document.
        source: token of the row that each copy repeats, 0 where there is none, [batch, m].
        is_copy: bool [batch, m].
        seen: where, among n + m, the state of each token under the view is, [batch, n].
    """

    segments: tuple[Segment, ...]
    source: torch.Tensor
    is_copy: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(cls, labelled: Labelled, first: torch.Tensor) -> "TwoViewLayout":
        """Lay out a batch.

        Args:
            labelled: the batch.
            first: first t that the view moves, in the shape of documents, [batch, 1] or [batch, n].
        """
        batch, n = labelled.t.shape
        moved = labelled.valid & (labelled.t >= first)
        n_copies = moved.long().cumsum(1)
        m = max(int(n_copies[:, -1].max()), 1)
        source = torch.zeros(batch, m, dtype=torch.int64, device=moved.device)
        is_copy = torch.zeros(batch, m, dtype=torch.bool, device=moved.device)
        rows, tokens = moved.nonzero(as_tuple=True)
        places = n_copies[rows, tokens] - 1
        source[rows, places] = tokens
        is_copy[rows, places] = True
        seen = torch.where(moved, n + n_copies - 1, torch.arange(n, device=moved.device))
        segments, copy = [], dict.fromkeys(range(batch), n)
        firsts = torch.tensor([span[:2] for span in labelled.spans], dtype=torch.int64, device=moved.device).view(-1, 2)
        in_document = labelled.per_document(moved)[labelled.ordinal[firsts[:, 0], firsts[:, 1]]]
        for (row, begin, length), k in zip(labelled.spans, in_document.tolist(), strict=True):
            segments.append(Segment(row, begin, begin + length - k, begin + length, copy[row]))
            copy[row] += k
        return cls(tuple(segments), source, is_copy, seen)

    def tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of tokens and copies, [batch, n + m]."""
        return torch.cat([ids, ids.gather(1, self.source).masked_fill(~self.is_copy, 0)], 1)

    def index(self, positions: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """RoPE indices of tokens and copies, [batch, n + m], from true positions and those of the view, [batch, n]."""
        copies = moved.gather(1, self.source).masked_fill(~self.is_copy, 0)
        return torch.cat([positions.to(moved.dtype), copies], 1)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of both views, [batch, n + m, n_heads, head_dim], by fused calls without a mask in memory.

        Args:
            query: [batch, n_heads, n + m, head_dim].
            key: [batch, n_kv_heads, n + m, head_dim].
            value: likewise.
            scale: of the scores.
        """
        shared = query.shape[1] != key.shape[1]
        pieces: list[list[tuple[int, torch.Tensor]]] = [[] for _ in query]
        for one in self.segments:
            row, whole = slice(one.row, one.row + 1), slice(one.begin, one.end)
            q, k, v = (x[row, :, whole] for x in (query, key, value))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
            pieces[one.row].append((one.begin, seen))
        for one in self.segments:
            n_copies = one.end - one.split
            if not n_copies:
                continue
            row, copies = slice(one.row, one.row + 1), slice(one.copy, one.copy + n_copies)
            k, v = (torch.cat([x[row, :, one.begin : one.split], x[row, :, copies]], 2) for x in (key, value))
            # bottom-right: the first copy sees the whole prefix and itself
            mask = causal_lower_right(n_copies, k.shape[2])
            seen = F.scaled_dot_product_attention(
                query[row, :, copies], k, v, attn_mask=mask, scale=scale, enable_gqa=shared
            )
            pieces[one.row].append((one.copy, seen))
        # joined, not written into one tensor: autograd would copy all of it for each piece
        like = query[:1, :, :, : value.shape[-1]]
        return torch.cat([_joined(row, like) for row in pieces]).transpose(1, 2)


def _joined(pieces: list[tuple[int, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Pieces [1, n_heads, n, head_dim] at their rising places, zeros between them, in the shape of `like`."""
    parts, place = [], 0
    for begin, piece in [*pieces, (like.shape[2], like[:, :, :0])]:
        parts += [like.new_zeros(*like.shape[:2], begin - place, like.shape[3]), piece]
        place = begin + piece.shape[2]
    return torch.cat(parts, 2)


_MIXES_TOKENS = ("mamba", "conv", "ssm", "recurrent", "deltanet", "rwkv", "linearattention", "lightning")


def why_two_passes(core: nn.Module, decoder: Any) -> str | None:
    """Why a model needs two passes for two views, None where one is exact."""
    name = attention_name(core)
    if name != "sdpa":
        return f"attention implementation {name!r}"
    config = decoder.config
    types = set(getattr(config, "layer_types", None) or [])
    if types - {"full_attention"}:
        return f"layers of type {', '.join(sorted(types - {'full_attention'}))}"
    if getattr(config, "sliding_window", None) is not None and not types:
        return "sliding-window attention"
    for module in decoder.modules():
        kind = type(module).__name__.lower()
        if any(part in kind for part in _MIXES_TOKENS):
            return f"{type(module).__name__}, which carries a state from token to token"
        if isinstance(module, nn.Dropout) and module.p > 0:
            return "dropout, which two passes draw apart"
    if getattr(config, "attention_dropout", 0.0):
        return "attention dropout, which two passes draw apart"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "soft-capped attention scores"
    return None
