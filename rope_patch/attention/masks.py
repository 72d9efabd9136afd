"""Masks that say which key a query sees, in the forms that attention implementations take."""

from collections.abc import Callable
from typing import Any

import torch


def additive_mask(visible: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What eager attention adds to its scores: the bias where a query sees a key, else the lowest number of its dtype.

    That number and not -inf, as Transformers has it: a query that sees nothing gets the mean of all values, not NaN.

    Args:
        visible: bool, [..., n, n_keys].
        bias: of the dtype of the queries, broadcasts with `visible`; 0 for a mask that does nothing else.
    """
    return bias.masked_fill(~visible, torch.finfo(bias.dtype).min)


def causal_band(n_queries: int, n_keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Whether a query sees a key, bool [n_queries, n_keys], where the last of both is the same token.

    Args:
        n_queries: the last ones of the keys' tokens.
        n_keys: at least as many.
        window: most tokens back that a query sees, itself counted.
        device: where the mask lives.
    """
    distance = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    return (distance >= 0) & (distance < window)


def finished_mask(rows: int, device: torch.device) -> torch.Tensor:
    """What a forward is given as its mask, so that none is made: one of four dimensions is taken for a finished one."""
    return torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=device)


def block_mask(visible: Callable[..., torch.Tensor], batch: int, n_heads: int | None, like: torch.Tensor) -> Any:
    """Flex attention's mask, without the mask of n x n numbers on a GPU.

    Args:
        visible: of (row, head, query, key), tensors of indices that broadcast, whether the query sees the key.
        batch: rows.
        n_heads: None where all are alike.
        like: queries [..., n, head_dim]; as many keys.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    # elsewhere compiling takes longer than it saves
    make = torch.compile(create_block_mask) if like.is_cuda else create_block_mask
    return make(visible, batch, n_heads, like.shape[-2], like.shape[-2], device=str(like.device))
