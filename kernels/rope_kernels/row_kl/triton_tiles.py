"""What the Triton kernels of this family share: which keys are seen, a difference of maps, the tiles of a launch.

A row's softmax is exp2(z scale - top - log_sum), with z the dot products, scale times log2(e) and top the largest of
z scale. The two parts of its log-sum-exp stay apart: top is rounded alike for all entries of a row, so its rounding
cancels, while one rounded log-sum-exp of some hundreds would leave a probability close to 1 off by more than student
and teacher differ. Rows that see nothing have log_sum = +inf, so that all their probabilities are 0 without a branch:
they are known by a sum of exactly 0 and a top that never rose, while a nan or an infinity in a row that sees something
is in a sum, or in the gap where all of its scores are -inf, and goes on to the KL and, by log_sum, to the gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .visibility import Visibility

LOG2E = 1.4426950408889634


@triton.jit
def visible(row, col, row_document, document_ptr, n, CAUSAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """Whether queries `row` [M] see keys `col` [N], [M, N]."""
    seen = (row[:, None] < n) & (col[None, :] < n)
    if CAUSAL:
        seen &= col[None, :] <= row[:, None]
    if HAS_DOCUMENTS:
        col_document = tl.load(document_ptr + col, mask=col < n, other=-2)
        seen &= (row_document[:, None] == col_document[None, :]) & (row_document[:, None] >= 0)
    return seen


@triton.jit
def difference(zs, zt, top_s, log_sum_s, top_t, log_sum_t, scale_s, scale_t):
    """P_student - P_teacher."""
    return tl.exp2(zs * scale_s - top_s - log_sum_s) - tl.exp2(zt * scale_t - top_t - log_sum_t)


def launch_options(x: torch.Tensor, visibility: Visibility, stage: str) -> dict[str, Any]:
    """Tiles and compile-time facts of a launch."""
    head_dim = x.shape[-1]
    block_d = max(16, triton.next_power_of_2(head_dim))
    wide = block_d * x.element_size()  # bytes of a row in shared memory
    if wide > 256:
        block_m, block_n, warps, stages = (64, 32, 4, 1) if wide > 512 else (64, 64, 4, 1)
    elif stage == "forward":
        block_m, block_n, warps, stages = 128, 128, 8, 2
    else:
        block_m, block_n, warps, stages = 64, 64, 4, 2
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "CAUSAL": visibility.causal,
        "HAS_DOCUMENTS": visibility.document is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        # tensor cores would round float32 to 10 bits
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": warps,
        "num_stages": stages,
    }
