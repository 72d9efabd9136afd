"""Autocast for operators that are not among those that torch casts for."""

from typing import TypeVar

import torch

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


def as_multiplied(x: MaybeTensor) -> MaybeTensor:
    """`x` in the dtype that autocast would multiply it in: `x` itself without autocast, and unless it is float32.

    Float32 weights under bf16 autocast are the trainers' default. Attention and linear layers then multiply in bf16; a
    loss on their outputs that did not would run many times slower.
    """
    if x is None or x.dtype != torch.float32:
        return x
    dtype = multiplied_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def multiplied_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast multiplies float32 on a device; None without autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def whole(x: torch.Tensor) -> torch.Tensor:
    """A sharded tensor (DTensor), gathered; gradients flow back to the shards."""
    full: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full
