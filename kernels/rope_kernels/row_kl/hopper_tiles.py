"""What the Hopper kernels share: the rows of a warpgroup, and TMA's descriptions of tiles, in Gluon."""

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32}
# rows of a warpgroup, the fewest that its matrix product takes
ROWS: gl.constexpr = gl.constexpr(64)
# its name since Triton 3.8, and before
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def documents_of(document_ptr, start, n, SIZE: gl.constexpr):
    """Documents of SIZE tokens from start on, and behind the end that of the last token.

    Every one of the four warps has all of them, so that none waits for another where they are compared.
    """
    token = start + gl.arange(0, SIZE, gl.BlockedLayout([SIZE // 32], [32], [4], [0]))
    return gl.load(document_ptr + gl.minimum(token, n - 1))


@gluon.jit
def shared_document(documents):
    """The document that all of `documents` are, -1 where all are padding, -2 where they differ."""
    lowest = gl.min(documents, 0)
    return gl.where(lowest == gl.max(documents, 0), lowest, -2)


@gluon.jit
def differ(documents, document):
    """Whether one of `documents` is another one than `document`."""
    return gl.max((documents != document).to(gl.int32), 0) > 0


@gluon.jit
def documents_of_queries(document_ptr, row, n):
    """Documents of queries, and -2, that of no key, for padding and behind the end."""
    document = gl.load(document_ptr + row, mask=row < n, other=-1)
    return gl.where(document >= 0, document, -2)


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
