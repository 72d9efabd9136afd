"""Backward of `relation_kl` on Hopper GPUs: rows made ready, `hopper_relation_kernel` over them, integer sums added."""

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import triton_relation_backward
from .hopper_inputs import heads_of_a_launch
from .hopper_relation_kernel import relation_kl_hopper_bwd_kernel
from .hopper_tiles import describe, width
from .triton_tiles import LOG2E
from .visibility import Visibility


@triton.jit(do_not_specialize=["n"])
def _relation_kl_prepare_kernel(
    grad_ptr,
    top_s_ptr,
    log_sum_s_ptr,
    top_t_ptr,
    log_sum_t_ptr,
    top_ptr,
    largest_ptr,
    shift_s_ptr,
    shift_t_ptr,
    weight_ptr,
    quantum_ptr,
    unit_ptr,
    n,
    padded_n,
    factor,
    BLOCK: tl.constexpr,
):
    """What the kernels read of each row, for whole tiles, so that they need no masks: behind the end all are 0.

    weight is the incoming gradient over the head's largest, and quantum turns (C X)_i into an integer: with |C_ij| <=
    weight_i |P_s - P_t|_ij every sum over keys is below 2 weight_i max |X|, 1.01 covers what rounding C adds.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    at = head.to(tl.int64) * n + row  # in [heads, n]
    to = head.to(tl.int64) * padded_n + row  # in [heads, padded_n]
    in_row = row < n
    in_padded = row < padded_n
    top = tl.load(top_ptr + head)
    weight = tl.load(grad_ptr + at, mask=in_row, other=0.0) / tl.where(top == 0.0, 1.0, top)
    weight = tl.where(tl.abs(weight) < 1e-12, 0.0, weight)
    shift_s = tl.load(top_s_ptr + at, mask=in_row, other=float("inf")) + tl.load(
        log_sum_s_ptr + at, mask=in_row, other=0.0
    )
    shift_t = tl.load(top_t_ptr + at, mask=in_row, other=float("inf")) + tl.load(
        log_sum_t_ptr + at, mask=in_row, other=0.0
    )
    largest = tl.load(largest_ptr + head)
    # 2**30: a sum is below twice that, which an int32 holds
    quantum = 1073741824.0 / (1.01 * tl.maximum(largest, 1e-15))
    tl.store(shift_s_ptr + to, -shift_s, mask=in_padded)
    tl.store(shift_t_ptr + to, -shift_t, mask=in_padded)
    tl.store(weight_ptr + to, weight, mask=in_padded)
    tl.store(quantum_ptr + to, tl.where(weight == 0.0, 0.0, quantum / weight), mask=in_padded)
    # an integer cannot be nan or infinite, so its unit is, where the student is: 0 * inf is nan
    tl.store(unit_ptr + to, weight * (top * factor) / quantum + 0.0 * largest, mask=in_padded)


@triton.jit(do_not_specialize=["n", "n_heads", "first_head"])
def _relation_kl_finish_kernel(
    sum_ptr,
    unit_ptr,
    out_ptr,
    padded_n,
    stride_b,
    stride_h,
    stride_n,
    n,
    n_heads,
    first_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add the queries' part, integers times the unit of their row, to the keys' part."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = first_head + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    sums = sum_ptr + (tl.program_id(1).to(tl.int64) * padded_n + row)[:, None] * BLOCK_D + d[None, :]
    unit = tl.load(unit_ptr + head.to(tl.int64) * padded_n + row)
    out_ptr += (head // n_heads).to(tl.int64) * stride_b + (head % n_heads).to(tl.int64) * stride_h
    at = out_ptr + row[:, None].to(tl.int64) * stride_n + d[None, :]  # [BLOCK_M, BLOCK_D], and so is sums
    mask = (row < n)[:, None] & (d < HEAD_DIM)[None, :]
    key = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    query = tl.load(sums).to(tl.float32) * unit[:, None]
    tl.store(at, (key + query).to(out_ptr.dtype.element_ty), mask=mask)


def relation_kl_backward(
    grad: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    parts: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    visibility: Visibility,
) -> torch.Tensor:
    """`triton_relation_backward.relation_kl_backward` for what `runs_on_hopper`."""
    batch, n_heads, n, head_dim = student.shape
    heads = batch * n_heads
    grad_s = torch.empty_like(student)
    block_d = width(head_dim)
    n_groups = 2 if block_d == 128 else 3
    blocks = triton.cdiv(n, 64 * n_groups)
    padded_n = blocks * 64 * n_groups
    grad = grad.contiguous()
    top = grad.abs().amax(-1)  # [batch, n_heads], and so is largest
    largest = torch.linalg.vector_norm(student, float("inf"), dim=(-2, -1)).float()
    rows = parts.new_empty(5, heads, padded_n)  # shifts of student and teacher, weight, quantum, unit
    _relation_kl_prepare_kernel[(triton.cdiv(padded_n, 1024), heads)](
        grad, *parts, top, largest, *rows, n, padded_n, student_scale, BLOCK=1024
    )
    launch_heads = heads_of_a_launch(heads, padded_n * block_d * 4)
    # zeros, because blocks add to them
    sums = torch.zeros(launch_heads * padded_n, block_d, dtype=torch.int32, device=student.device)
    s_desc, t_desc = (describe(x, 64, block_d) for x in (student, teacher))
    sum_desc = TensorDescriptor.from_tensor(sums, [64, block_d], gl.NVMMASharedLayout(128, 32, 2))
    for first_head in range(0, heads, launch_heads):
        here = min(launch_heads, heads - first_head)
        if first_head > 0:
            sums.zero_()
        relation_kl_hopper_bwd_kernel[(blocks * here,)](
            s_desc,
            t_desc,
            *rows[:4],
            top,
            visibility.document,
            visibility.end,
            sum_desc,
            grad_s,
            padded_n,
            *grad_s.stride()[:3],
            student_scale * LOG2E,
            teacher_scale * LOG2E,
            student_scale,
            n,
            n_heads,
            first_head,
            here,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            S_STAGES=4 if block_d == 128 else 6,
            T_STAGES=2 if block_d == 128 else 4,
            OUT_STAGES=1 if block_d == 128 else 2,
            N_GROUPS=n_groups,
            REGISTERS=128 if block_d == 128 else 96,
            HAS_DOCUMENTS=visibility.document is not None,
            num_warps=4,
        )
        _relation_kl_finish_kernel[(padded_n // 64, here)](
            sums,
            rows[4],
            grad_s,
            padded_n,
            *grad_s.stride()[:3],
            n,
            n_heads,
            first_head,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=64,
        )
    if visibility.document is not None:
        # integers hold no nan, and a head's largest values are those of all its documents: where one is broken, these
        # kernels keep the others apart
        inputs = (grad, student, teacher, parts, student_scale, teacher_scale, visibility)
        triton_relation_backward.repair(inputs, grad_s, rows[4])
    return grad_s
