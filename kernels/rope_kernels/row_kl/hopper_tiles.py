"""What the Hopper kernels share: the rows of a warpgroup, and TMA's descriptions of tiles, in Gluon."""

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32}
# rows of a warpgroup, the fewest that its matrix product takes
ROWS: gl.constexpr = gl.constexpr(64)
# its name since Triton 3.8, and before
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def width(head_dim: int) -> int:
    """Features of a tile: TMA fills what is behind head_dim with zeros."""
    return 64 if head_dim <= 64 else 128


def describe(x: torch.Tensor, rows: int, block_d: int) -> Any:
    """TMA's description of `rows` tokens of one head of [batch, n_heads, n, head_dim], or of [n, head_dim].

    The address and the steps of `x` are multiples of 16 bytes.
    """
    made = object.__new__(TensorDescriptor)  # whose __init__ checks again what depends on the shape alone
    made.__dict__.update(_described(x.shape, x.stride(), x.dtype, rows, block_d), base=x)
    return made


@lru_cache(maxsize=1024)
def _described(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, block_d: int
) -> dict[str, Any]:
    """Fields of a description of any tensor of a shape and strides."""
    # the stride of a dimension of one element is arbitrary in torch, and checked by TMA
    steps = [stride if size > 1 else block_d for stride, size in zip(strides[:-1], shape[:-1], strict=True)]
    block = [1] * (len(shape) - 2) + [rows, block_d]
    layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON_DTYPES[dtype])
    return vars(TensorDescriptor(torch.empty(16, dtype=dtype), list(shape), [*steps, 1], block, layout))
