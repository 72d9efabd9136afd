"""What the Hopper kernels share: the rows of a warpgroup, and TMA's descriptions of tiles, in Gluon."""

from functools import cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# rows of a warpgroup, the fewest that its matrix product takes
ROWS: gl.constexpr = gl.constexpr(64)
# its name since Triton 3.8, and before
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def width(head_dim: int) -> int:
    """Features of a tile: TMA fills what is behind head_dim with zeros."""
    return 64 if head_dim <= 64 else 128


def describe(x: torch.Tensor, rows: int, block_d: int) -> Any:
    """TMA's description of `rows` tokens of one head of [batch, n_heads, n, head_dim]."""
    # the stride of a dimension of one element is arbitrary in torch, and checked by TMA
    strides = [stride if size > 1 else block_d for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, block_d], _layout(rows, block_d, x.dtype))


@cache
def _layout(rows: int, block_d: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d], _GLUON_DTYPES[dtype])
