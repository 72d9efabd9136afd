"""What the KLs between rows of maps share: checks of their inputs, and which implementation runs."""

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GRID_Y = 65535  # heads times rows of a launch


def runs_on_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels run on `x`: on a GPU, except for float64, which tensor cores do not speak here."""
    return x.is_cuda and x.dtype != torch.float64


def empty_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of the shapes that the operators return, for tracing."""
    kl = x.new_empty(x.shape[:3], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return kl, kl.new_empty(4, *kl.shape) if runs_on_triton(x) else kl.new_empty(0)


def require_heads(name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Refuse what is not a pair of [batch, n_heads, n, head_dim] of one shape, dtype and device.

    Raises:
        ValueError: see above.
    """
    if x.ndim != 4 or x.dtype not in _DTYPES or min(x.shape) < 1:
        raise ValueError(
            f"{name} must be [batch, n_heads, n, head_dim], none 0, floating point, got {list(x.shape)} {x.dtype}."
        )
    if other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
        raise ValueError(
            f"{other_name} must be {list(x.shape)} {x.dtype} on {x.device} as {name} is, got {list(other.shape)} "
            f"{other.dtype} on {other.device}."
        )
    if runs_on_triton(x) and (x.shape[-1] > 256 or x.shape[0] * x.shape[1] > _GRID_Y):
        raise ValueError(
            f"{name} may have head_dim up to 256 and batch * n_heads up to {_GRID_Y} on a GPU, got {list(x.shape)}."
        )


def unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    """`x` as it is, or a contiguous copy where the features of a token are not neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()
