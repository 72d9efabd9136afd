"""Attention of each query to the tokens of a window before it, block by block, without masks of n x n."""

from itertools import pairwise

import torch
from torch.nn import functional as F  # noqa: N812

from .masks import causal_band

BLOCK = 1024
"""Queries that look through one window at once, at least the window: shorter ones launch more, longer ones see less."""


class WindowedAttention:
    """softmax(scale q k^T) v over the last `window` tokens, memory and work linear in n; and the small masks it takes.

    A block of queries sees its own keys and the window - 1 before them, under a mask of those alone. So does backward.
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
            window: most tokens that a query sees, itself counted, at least 1.
            scale: of the products.
            dropout: probability with which a weight counts as 0, and the others for as much more.
        """
        n, n_heads = query.shape[2], query.shape[1]
        block = max(window, BLOCK)
        # keys of the first block may begin before its queries, as those of every other one do
        before = min(key.shape[2] - n, window - 1)
        keys = _overlapping(key[:, :, key.shape[2] - n - before :], before, block, window - 1)
        values = _overlapping(value[:, :, value.shape[2] - n - before :], before, block, window - 1)
        out = []
        for q, k, v in zip(query.split(block, 2), keys, values, strict=True):
            # the kernels that take masks repeat shared keys themselves, the slow one in full precision
            k, v = repeated(k, n_heads), repeated(v, n_heads)
            visible = self._visible_in(window, q.shape[2], k.shape[2], q.device)
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
        """Causal attention within the window, of the last queries; of all of them without one, or with a wider one."""
        if window is not None and window < key.shape[2]:
            return self(query, key, value, window, scale, dropout)
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=shared
        )

    def _visible_in(self, window: int, n: int, n_keys: int, device: torch.device) -> torch.Tensor:
        """[n, n_keys], whether a query sees a key, where the last of both is the same token."""
        key = (window, n, n_keys)
        if key not in self._visible:
            self._visible[key] = causal_band(n, n_keys, window, device)
        return self._visible[key].to(device)


def _overlapping(x: torch.Tensor, before: int, block: int, overlap: int) -> list[torch.Tensor]:
    """Blocks of [batch, heads, before + n, d], each behind the last `overlap` tokens before it.

    All pieces come of one split, since autograd makes a whole tensor for each slice by itself.

    Args:
        x: keys or values.
        before: tokens before the first block, at most `overlap`.
        block: tokens of a block, more than `overlap`; the last one may be shorter.
        overlap: tokens of the block before that a block begins with.
    """
    n = x.shape[2] - before
    ends = [before + min(first + block, n) for first in range(0, n, block)]
    inner = [end - overlap for end in ends[:-1]]  # where the part begins that the next block has too
    borders = sorted({0, before, x.shape[2], *ends, *inner})
    pieces = dict(zip(borders, x.split([b - a for a, b in pairwise(borders)], 2), strict=False))
    blocks = []
    for begin, end in zip([0, *inner], ends, strict=True):
        own = [piece for start, piece in pieces.items() if begin <= start < end]
        blocks.append(own[0] if len(own) == 1 else torch.cat(own, 2))
    return blocks


def repeated(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Each of the heads of keys or values, [batch, n_kv_heads, n, d], as often as query heads share it."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)
