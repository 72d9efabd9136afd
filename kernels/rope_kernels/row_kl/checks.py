"""Checks of heads and scales for operators on rows of maps."""

import torch

from ..common.checks import described, require_positive, require_tensor
from ..common.devices import runs_on_triton

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GRID_Y = 65535  # heads times rows of a launch


def scales_of(head_dim: int, student_scale: float | None, teacher_scale: float | None) -> tuple[float, float]:
    """Both scales, head_dim ** -0.5 for None.

    Raises:
        ValueError: one is no finite number above 0.
    """
    student, teacher = (
        head_dim**-0.5 if scale is None else require_positive(name, scale, ", or None for head_dim ** -0.5")
        for name, scale in (("student_scale", student_scale), ("teacher_scale", teacher_scale))
    )
    return student, teacher


def require_heads(name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check that both are [batch, n_heads, n, head_dim] of one shape, dtype and device.

    Raises:
        ValueError: one is not, they differ, or they are too large for a launch on a GPU.
    """
    allowed = "[batch, n_heads, n, head_dim], none 0, float16, bfloat16, float32 or float64"
    require_tensor(name, x, allowed)
    if x.ndim != 4 or x.dtype not in _DTYPES or min(x.shape) < 1:
        raise ValueError(f"{name} must be {allowed}, got {described(x)}.")
    if (
        not isinstance(other, torch.Tensor)
        or other.shape != x.shape
        or other.dtype != x.dtype
        or other.device != x.device
    ):
        raise ValueError(f"{other_name} must be {described(x)} as {name} is, got {described(other)}.")
    if runs_on_triton(x) and (x.shape[-1] > 256 or x.shape[0] * x.shape[1] > _GRID_Y):
        raise ValueError(
            f"{name} may have head_dim up to 256 and batch * n_heads up to {_GRID_Y} on a GPU, got {list(x.shape)}."
        )
