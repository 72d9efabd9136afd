"""Sliding-window attention in blocks of queries, without n x n masks."""

from itertools import pairwise

import torch
from torch.nn import functional as F  # noqa: N812

from .masks import causal_band
from .prefix import kernels_for

BLOCK = 1024
"""Queries of a block, unless the window is longer: shorter blocks launch more kernels, longer ones multiply more."""


class WindowedAttention:
    """softmax(scale q k^T) v over the last `window` tokens, in memory and time linear in n. Keeps its small masks.

    A block of queries is multiplied with its own keys and the window - 1 keys before, under a mask of this size.
    """

    def __init__(self) -> None:
        self._visible: dict[tuple[int, int, int], torch.Tensor] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        scale: float,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Output of the last n tokens of n_keys, [batch, n_heads, n, value_dim].

        Args:
            query: [batch, n_heads, n, head_dim].
            key: [batch, n_kv_heads, n_keys, head_dim], n_keys >= n.
            value: [batch, n_kv_heads, n_keys, value_dim].
            window: most tokens that a query sees, itself included, at least 1.
            scale: of the products.
            dropout: probability with which a weight is set to 0.
        """
        n, n_heads = query.shape[2], query.shape[1]
        block = max(window, BLOCK)
        # keys before the first query that its block sees; later blocks see window - 1
        before = min(key.shape[2] - n, window - 1)
        keys = _overlapping(key[:, :, key.shape[2] - n - before :], before, block, window - 1)
        values = _overlapping(value[:, :, value.shape[2] - n - before :], before, block, window - 1)
        out = []
        for q, k, v in zip(query.split(block, 2), keys, values, strict=True):
            # kernels that take masks repeat shared keys themselves, the slow one in full precision
            k, v = repeated(k, n_heads), repeated(v, n_heads)  # [batch, n_heads, at most block + window - 1, d]
            shape = (window, q.shape[2], k.shape[2])
            if shape not in self._visible:
                self._visible[shape] = causal_band(q.shape[2], k.shape[2], window, q.device)  # [queries, keys]
            visible = self._visible[shape].to(q.device)  # layers may be on several devices
            with kernels_for(q, k):
                out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout, scale=scale))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def causal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scale: float,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Causal attention within the window. Without one, or with one as wide as the keys, n must be n_keys."""
        if window is not None and window < key.shape[2]:
            return self(query, key, value, window, scale, dropout)
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=shared
        )


def _overlapping(x: torch.Tensor, before: int, block: int, overlap: int) -> list[torch.Tensor]:
    """Blocks of keys or values, each with the last `overlap` tokens before it.

    All pieces come from one split, because the backward of each separate slice makes a tensor of the size of x.

    Args:
        x: [batch, heads, before + n, d].
        before: tokens before the first block, at most `overlap`.
        block: tokens of a block, more than `overlap`; the last block may be shorter.
        overlap: tokens of the previous block that a block begins with.
    """
    n = x.shape[2] - before
    ends = [before + min(first + block, n) for first in range(0, n, block)]  # where blocks end in x
    inner = [end - overlap for end in ends[:-1]]  # where the part begins that the next block shares
    borders = sorted({0, before, x.shape[2], *ends, *inner})  # every place where some block begins or ends
    pieces = dict(zip(borders, x.split([b - a for a, b in pairwise(borders)], 2), strict=False))
    blocks = []
    for begin, end in zip([0, *inner], ends, strict=True):
        parts = [piece for start, piece in pieces.items() if begin <= start < end]
        blocks.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
    return blocks


def repeated(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Keys or values [batch, n_kv_heads, n, d] as [batch, n_heads, n, d]: each head once for every query head."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)
