"""What the Triton kernels of this family share: which keys are seen, a difference of maps, the tiles of a launch.

A row's softmax is exp2(z scale - top - log_sum), with z the dot products, scale times log2(e) and top the largest of
z scale. The two parts of its log-sum-exp stay apart: top is rounded alike for all entries of a row, so its rounding
cancels, while one rounded log-sum-exp of some hundreds would leave a probability close to 1 off by more than student
and teacher differ. Rows that see nothing have log_sum = +inf, so that all their probabilities are 0 without a branch:
they are known by a sum of exactly 0 and a top that never rose, while a nan or an infinity in a row that sees something
is in a sum, or in the gap where all of its scores are -inf, and goes on to the KL and, by log_sum, to the gradient.
"""

import sys
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from .visibility import Visibility

LOG2E = 1.4426950408889634
Stage = Literal["forward", "backward"]


class Tiles(NamedTuple):
    """Rows of a block, rows of the other side that it walks over at a time, warps, and pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# for GPUs with less shared memory than an H200's 227 KiB: an A100 has 163, consumer GPUs have 99
_SMALLER = (
    Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 16, 4, 1),
    Tiles(16, 16, 4, 1),
)  # fmt: skip
# float32 is multiplied without tensor cores: a thread then has whole rows of both operands in registers, and so many
# threads share a tile that next to none are spilled. The GPU sets memory aside for what all its threads might spill
_FLOAT32 = (Tiles(64, 64, 16, 1), Tiles(32, 32, 16, 1), Tiles(32, 16, 8, 1), Tiles(16, 16, 4, 1))
_SCRATCH = 2048  # bytes of sums over rows


@triton.jit
def visible(row, col, row_document, document_ptr, n, CAUSAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """Whether queries `row` [M] see keys `col` [N], [M, N]."""
    seen = (row[:, None] < n) & (col[None, :] < n)
    if CAUSAL:
        seen &= col[None, :] <= row[:, None]
    if HAS_DOCUMENTS:
        col_document = tl.load(document_ptr + col, mask=col < n, other=-2)  # the document of no query
        seen &= (row_document[:, None] == col_document[None, :]) & (row_document[:, None] >= 0)
    return seen


@triton.jit
def difference(zs, zt, top_s, log_sum_s, top_t, log_sum_t, scale_s, scale_t):
    """P_student - P_teacher."""
    return tl.exp2(zs * scale_s - top_s - log_sum_s) - tl.exp2(zt * scale_t - top_t - log_sum_t)


class Kind(NamedTuple):
    """What of a call, beside strides and scales, decides how kernels are launched."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    causal: bool
    has_documents: bool


def kind_of(student_q: torch.Tensor, visibility: Visibility) -> Kind:
    """The kind of a call."""
    return Kind(student_q.shape, student_q.dtype, student_q.device, visibility.causal, visibility.document is not None)


def launch_options(kind: Kind, stage: Stage) -> dict[str, Any]:
    """Tiles and compile-time facts of a launch."""
    head_dim = kind.shape[-1]
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles = tiles_of(block_d, kind.dtype.itemsize, stage, *_shared_memory(kind.device))
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "CAUSAL": kind.causal,
        "HAS_DOCUMENTS": kind.has_documents,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        # tensor cores would round float32 to 10 bits
        "PRECISION": "ieee" if kind.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def tiles_of(block_d: int, element_size: int, stage: Stage, capability: int, shared_memory: int) -> Tiles:
    """The first tiles that fit the shared memory of a GPU; for 16 bits, the fastest of an H200 come first.

    Args:
        block_d: features of a tile.
        element_size: bytes of a feature.
        stage: which kernel.
        capability: major compute capability of the GPU.
        shared_memory: bytes that a block may have there.

    Returns:
        Those, or the smallest ones if none fit.
    """
    wide = block_d * element_size  # bytes of a row
    candidates: tuple[Tiles, ...]
    if element_size == 4:
        candidates = _FLOAT32
    elif wide > 256:
        candidates = (Tiles(64, 32, 4, 1) if wide > 512 else Tiles(64, 64, 4, 1), *_SMALLER)
    else:
        candidates = (Tiles(128, 128, 8, 2) if stage == "forward" else Tiles(64, 64, 4, 2), *_SMALLER)
    for tiles in candidates:
        # student and teacher have a tile of their own, and one of the other side in each stage that is on its way:
        # before Hopper one stage of them is in registers
        ahead = tiles.stages if capability >= 9 else max(1, tiles.stages - 1)
        needed = 2 * (tiles.block_m + ahead * tiles.block_n) * wide + _SCRATCH
        if stage == "backward":
            needed += tiles.block_m * tiles.block_n * element_size  # the difference of the maps
        if needed <= shared_memory:
            break
    return tiles


@cache
def _shared_memory(device: torch.device) -> tuple[int, int]:
    """Major compute capability, and bytes of shared memory that a block may have; no bound in Triton's interpreter."""
    if device.type != "cuda":
        return 9, sys.maxsize
    properties: Any = torch.cuda.get_device_properties(device)  # whose types lack the second field
    return properties.major, properties.shared_memory_per_block_optin
