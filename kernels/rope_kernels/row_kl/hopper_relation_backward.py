"""Backward of `relation_kl` on Hopper GPUs: rows made ready, `hopper_relation_kernel` over them, integer sums added."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.launches import Launch
from . import triton_relation_backward
from .hopper_inputs import heads_of_a_launch
from .hopper_relation_kernel import relation_kl_hopper_bwd_kernel
from .hopper_tiles import describe, width
from .triton_tiles import LOG2E, Kind, kind_of
from .visibility import Visibility

# a head is measured in as many parts at most
_PARTS = 128


@triton.jit
def _bits(x):
    """|x| as integers, which have the order of floats, with nan above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["n", "n_heads", "launch_heads", "tiles"])
def _relation_kl_measure_kernel(
    grad_ptr,
    x_ptr,
    largest_ptr,
    sum_ptr,
    padded_n,
    stride_b,
    stride_h,
    stride_n,
    n,
    n_heads,
    launch_heads,
    tiles,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The largest |gradient| and |X| of some tiles of a head, nan if one is nan; zeros for the first launch's sums.

    `largest` is [1 + 2 parts, heads]: the gradient's of the whole head, which comes later, and of each part, then X's.
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    d = tl.arange(0, BLOCK_D)
    x_ptr += (head // n_heads).to(tl.int64) * stride_b + (head % n_heads).to(tl.int64) * stride_h
    largest_grad = tl.zeros([BLOCK_M], tl.int32)
    largest_x = tl.zeros([BLOCK_M, BLOCK_D], tl.int32)
    for tile in range(part * tiles, (part + 1) * tiles):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        in_row = row < n
        grad = tl.load(grad_ptr + head.to(tl.int64) * n + row, mask=in_row, other=0.0)
        at = x_ptr + row[:, None].to(tl.int64) * stride_n + d[None, :]
        x = tl.load(at, mask=in_row[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        largest_grad = tl.maximum(largest_grad, _bits(grad))
        largest_x = tl.maximum(largest_x, _bits(x))
        sums = sum_ptr + (head.to(tl.int64) * padded_n + row)[:, None] * BLOCK_D + d[None, :]
        own = (row < padded_n) & (head < launch_heads)
        tl.store(sums, tl.zeros([BLOCK_M, BLOCK_D], tl.int32), mask=own[:, None] & (d >= 0)[None, :])
    to = largest_ptr + (1 + part) * heads + head
    tl.store(to, tl.max(largest_grad, 0).to(tl.float32, bitcast=True))
    largest = tl.max(tl.max(largest_x, 1), 0)
    tl.store(to + tl.num_programs(0) * heads, largest.to(tl.float32, bitcast=True))


@triton.jit
def _of_head(largest_ptr, head, heads, first, n_parts, PARTS: tl.constexpr):
    """The largest of a head's parts, nan if one is nan."""
    part = tl.arange(0, PARTS)
    x = tl.load(largest_ptr + (first + part) * heads + head, mask=part < n_parts, other=0.0)
    return tl.max(_bits(x), 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n", "n_parts"])
def _relation_kl_prepare_kernel(
    grad_ptr,
    top_s_ptr,
    log_sum_s_ptr,
    top_t_ptr,
    log_sum_t_ptr,
    largest_ptr,
    shift_s_ptr,
    shift_t_ptr,
    weight_ptr,
    quantum_ptr,
    unit_ptr,
    n,
    padded_n,
    factor,
    n_parts,
    PARTS: tl.constexpr,
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
    heads = tl.num_programs(1)
    top = _of_head(largest_ptr, head, heads, 1, n_parts, PARTS)
    tl.store(largest_ptr + head, top, mask=tl.program_id(0) == 0)
    weight = tl.load(grad_ptr + at, mask=in_row, other=0.0) / tl.where(top == 0.0, 1.0, top)
    weight = tl.where(tl.abs(weight) < 1e-12, 0.0, weight)
    shift_s = tl.load(top_s_ptr + at, mask=in_row, other=float("inf")) + tl.load(
        log_sum_s_ptr + at, mask=in_row, other=0.0
    )
    shift_t = tl.load(top_t_ptr + at, mask=in_row, other=float("inf")) + tl.load(
        log_sum_t_ptr + at, mask=in_row, other=0.0
    )
    largest = _of_head(largest_ptr, head, heads, 1 + n_parts, n_parts, PARTS)
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
    grad_s = torch.empty_like(student)
    plan = _plan(kind_of(student, visibility), student.stride(), grad_s.stride()[:3], student_scale, teacher_scale)
    grad = grad.contiguous()
    largest = parts.new_empty(plan.largest)
    sums = torch.empty(plan.sums, dtype=torch.int32, device=student.device)
    rows = parts.new_empty(plan.rows).unbind()  # shifts of student and teacher, weight, quantum, unit
    plan.measure(grad, student, largest, sums)
    plan.prepare(grad, *parts.unbind(), largest, *rows)
    block_d = plan.sums[1]
    s_desc, t_desc, sum_desc = (describe(x, 64, block_d) for x in (student, teacher, sums))
    for i, (multiply, finish) in enumerate(plan.heads):
        if i > 0:
            sums.zero_()
        multiply(s_desc, t_desc, *rows[:4], largest, visibility.document, visibility.end, sum_desc, grad_s)
        finish(sums, rows[4], grad_s)
    if visibility.document is not None:
        # integers hold no nan, and a head's largest values are those of all its documents: where one is broken, these
        # kernels keep the others apart
        inputs = (grad, student, teacher, parts, student_scale, teacher_scale, visibility)
        triton_relation_backward.repair(inputs, grad_s, rows[4])
    return grad_s


class _Plan(NamedTuple):
    """Shapes of what the backward keeps for itself, and its launches: the last two for some heads at a time."""

    largest: tuple[int, int]
    rows: tuple[int, int, int]
    sums: tuple[int, int]
    measure: Launch
    prepare: Launch
    heads: list[tuple[Launch, Launch]]


@lru_cache(maxsize=1024)
def _plan(
    kind: Kind, strides: tuple[int, ...], out_strides: tuple[int, ...], student_scale: float, teacher_scale: float
) -> _Plan:
    batch, n_heads, n, head_dim = kind.shape
    heads = batch * n_heads
    block_d = width(head_dim)
    n_groups = 2 if block_d == 128 else 3
    blocks = triton.cdiv(n, 64 * n_groups)
    padded_n = blocks * 64 * n_groups
    launch_heads = heads_of_a_launch(heads, padded_n * block_d * 4)
    tiles = triton.cdiv(padded_n, 64 * _PARTS)
    n_parts = triton.cdiv(padded_n, 64 * tiles)
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": block_d}
    measure = Launch(
        _relation_kl_measure_kernel,
        (n_parts, heads),
        (padded_n, *strides[:3], n, n_heads, launch_heads, tiles),
        **shape,
        BLOCK_M=64,
    )
    prepare = Launch(
        _relation_kl_prepare_kernel,
        (triton.cdiv(padded_n, 1024), heads),
        (n, padded_n, student_scale, n_parts),
        PARTS=triton.next_power_of_2(n_parts),
        BLOCK=1024,
    )
    of_heads = []
    for first_head in range(0, heads, launch_heads):
        here = min(launch_heads, heads - first_head)
        multiply = Launch(
            relation_kl_hopper_bwd_kernel,
            (blocks * here,),
            (
                *(padded_n, *out_strides, student_scale * LOG2E, teacher_scale * LOG2E, student_scale),
                *(n, n_heads, first_head, here),
            ),
            **shape,
            S_STAGES=4 if block_d == 128 else 6,
            T_STAGES=2 if block_d == 128 else 4,
            OUT_STAGES=1 if block_d == 128 else 2,
            N_GROUPS=n_groups,
            REGISTERS=128 if block_d == 128 else 96,
            HAS_DOCUMENTS=kind.has_documents,
            num_warps=4,
        )
        finish = Launch(
            _relation_kl_finish_kernel,
            (padded_n // 64, here),
            (padded_n, *out_strides, n, n_heads, first_head),
            **shape,
            BLOCK_M=64,
        )
        of_heads.append((multiply, finish))
    return _Plan(
        largest=(1 + 2 * n_parts, heads),
        rows=(5, heads, padded_n),
        sums=(launch_heads * padded_n, block_d),
        measure=measure,
        prepare=prepare,
        heads=of_heads,
    )
