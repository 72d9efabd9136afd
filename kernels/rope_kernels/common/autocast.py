"""What autocast means for operators that torch knows nothing of."""

from typing import TypeVar

import torch

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


def as_multiplied(x: MaybeTensor) -> MaybeTensor:
    """`x` in the dtype that autocast would multiply it in: `x` itself without autocast, and unless it is float32.

    Weights in float32 under bf16 autocast are the trainers' default. Attention and linear layers then multiply in bf16,
    and so must a loss on what they made, or it runs many times slower than they do.
    """
    if x is None or x.dtype != torch.float32:
        return x
    dtype = multiplied_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def multiplied_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast multiplies float32 in on a device; None without it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def whole(x: torch.Tensor) -> torch.Tensor:
    """A sharded tensor (DTensor) as an ordinary one, through which gradients flow back to the shards."""
    full: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full
