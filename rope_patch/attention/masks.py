"""Masks of the keys that a query sees, in the forms that attention implementations take."""

from collections.abc import Callable
from typing import Any

import torch


def additive_mask(visible: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What eager attention adds to its scores: `bias` where a query sees a key, else the lowest number of the dtype.

    Not -inf, as in Transformers: a query that sees nothing then gets the mean of all values, and not NaN.

    Args:
        visible: bool, [..., n, n_keys].
        bias: in the dtype of the queries, broadcasts with `visible`; 0 for a plain mask.
    """
    return bias.masked_fill(~visible, torch.finfo(bias.dtype).min)


def causal_band(n_queries: int, n_keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Whether a query sees a key, bool [n_queries, n_keys], where the last of both is the same token.

    Args:
        n_queries: in tokens.
        n_keys: in tokens, at least n_queries.
        window: most tokens that a query sees, itself included.
        device: of the mask.
    """
    # query i is token n_keys - n_queries + i
    distance = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    return (distance >= 0) & (distance < window)


def finished_mask(rows: int, device: torch.device) -> torch.Tensor:
    """A mask argument that keeps a model from making a mask: it takes one of four dimensions for a finished one."""
    return torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=device)


def block_mask(visible: Callable[..., torch.Tensor], batch: int, n_heads: int | None, like: torch.Tensor) -> Any:
    """Flex attention's block mask; on a GPU it is made without n x n numbers in memory.

    Args:
        visible: function of (row, head, query, key), tensors of indices that broadcast: whether the query sees the key.
        batch: number of rows.
        n_heads: None if all heads have the same mask.
        like: queries [..., n, head_dim]; there are n keys too.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    # on a CPU, compiling takes longer than it saves
    make = torch.compile(create_block_mask) if like.is_cuda else create_block_mask
    return make(visible, batch, n_heads, like.shape[-2], like.shape[-2], device=str(like.device))
