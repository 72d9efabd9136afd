"""Two views in one forward: the tokens, and once more those behind the first index that the view changes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right

from ..attention_calls import attention_name


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
    def of(cls, t: torch.Tensor, ordinal: torch.Tensor, valid: torch.Tensor, first: torch.Tensor) -> "TwoViewLayout":
        """Lay out a batch.

        Args:
            t: index of each token in its document, [batch, n].
            ordinal: of the document, [batch, n].
            valid: which tokens are real, bool [batch, n].
            first: first t that the view moves, in the shape of documents, [batch, 1] or [batch, n].
        """
        batch, n = t.shape
        moved = valid & (t >= first)
        rank = moved.long().cumsum(1) - 1
        m = max(int(moved.sum(1).max()), 1)
        source = torch.zeros(batch, m, dtype=torch.int64, device=t.device)
        is_copy = torch.zeros(batch, m, dtype=torch.bool, device=t.device)
        rows, tokens = moved.nonzero(as_tuple=True)
        source[rows, rank[rows, tokens]] = tokens
        is_copy[rows, rank[rows, tokens]] = True
        token = torch.arange(n, device=t.device).expand(batch, n)
        seen = torch.where(moved, n + rank, token)
        begins = valid & (t == 0)
        count = torch.zeros(int(ordinal.max()) + 1, dtype=torch.int64, device=t.device)
        length = count.scatter_add(0, ordinal.flatten(), valid.flatten().long())
        n_moved = count.scatter_add(0, ordinal.flatten(), moved.flatten().long())
        rows, tokens = begins.nonzero(as_tuple=True)
        number = ordinal[rows, tokens]
        split = tokens + length[number] - n_moved[number]
        before = (rank + 1 - moved.long())[rows, tokens]  # copies of the documents before it
        columns = (rows, tokens, split, tokens + length[number], n + before)
        segments = tuple(Segment(*values) for values in zip(*(x.tolist() for x in columns), strict=True))
        return cls(segments, source, is_copy, seen)

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
        out = torch.zeros_like(query[..., : value.shape[-1]])
        for one in self.segments:
            row, copies = slice(one.row, one.row + 1), slice(one.copy, one.copy + one.end - one.split)
            whole = (row, slice(None), slice(one.begin, one.end))
            out[whole] = F.scaled_dot_product_attention(
                query[whole], key[whole], value[whole], is_causal=True, scale=scale, enable_gqa=shared
            )
            n_copies = one.end - one.split
            if not n_copies:
                continue
            k, v = (torch.cat([x[row, :, one.begin : one.split], x[row, :, copies]], 2) for x in (key, value))
            # bottom-right: the first copy sees the whole prefix and itself
            mask = causal_lower_right(n_copies, k.shape[2])
            out[row, :, copies] = F.scaled_dot_product_attention(
                query[row, :, copies], k, v, attn_mask=mask, scale=scale, enable_gqa=shared
            )
        return out.transpose(1, 2)


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
