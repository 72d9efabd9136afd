"""Triton forward of `relation_kl` and `attention_map_kl`: the KL of each row, in one sweep over the keys it sees.

Imported where one of them is called on a GPU. `triton_tiles` explains the parts of a softmax.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..common.launches import Launch
from .triton_tiles import LOG2E, Kind, kind_of, launch_options, visible
from .visibility import Visibility


@triton.jit
def _accumulate(zs, zt, seen, top_s, sum_s, top_t, sum_t, gap, scale_s, scale_t, MASKED: tl.constexpr):
    """Add one tile of dot products to the running softmaxes of its rows, and to gap = sum_j exp2(a_t) (a_t - a_s)."""
    if MASKED:
        zs = tl.where(seen, zs, -float("inf"))
        zt = tl.where(seen, zt, -float("inf"))
    new_s = tl.maximum(top_s, tl.max(zs, 1) * scale_s)  # [BLOCK_M]
    new_t = tl.maximum(top_t, tl.max(zt, 1) * scale_t)
    a_s = zs * scale_s - new_s[:, None]  # [BLOCK_M, BLOCK_N]
    a_t = zt * scale_t - new_t[:, None]
    p = tl.exp2(a_t)
    weighted = p * (a_t - a_s)
    if MASKED:
        weighted = tl.where(seen, weighted, 0.0)
    move_s = top_s - new_s
    move_t = top_t - new_t
    shrink = tl.exp2(move_t)
    # what was summed relative to the old tops, relative to the new ones
    gap = (gap + sum_t * (move_t - move_s)) * shrink + tl.sum(weighted, 1)
    sum_s = sum_s * tl.exp2(move_s) + tl.sum(tl.exp2(a_s), 1)
    sum_t = sum_t * shrink + tl.sum(p, 1)
    return new_s, sum_s, new_t, sum_t, gap


@triton.jit(do_not_specialize=["n", "n_heads"])
def _row_kl_fwd_kernel(
    qs_ptr,
    ks_ptr,
    qt_ptr,
    kt_ptr,
    kl_ptr,
    top_s_ptr,
    log_sum_s_ptr,
    top_t_ptr,
    log_sum_t_ptr,
    document_ptr,
    first_ptr,
    end_ptr,
    scale_s,
    scale_t,
    n,
    n_heads,
    stride_qs_b,
    stride_qs_h,
    stride_qs_n,
    stride_ks_b,
    stride_ks_h,
    stride_ks_n,
    stride_qt_b,
    stride_qt_h,
    stride_qt_n,
    stride_kt_b,
    stride_kt_h,
    stride_kt_n,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    REPAIR: tl.constexpr,
):
    """KL and both log-sum-exps of one block of rows in one sweep over the keys that they see.

    For both sides it keeps top and sum: with a = z scale - top, sum = sum_j exp2(a_j), and beside them gap = sum_j
    exp2(a_t) (a_t - a_s). Then KL = gap / sum_t - log2(sum_t) + log2(sum_s), in bits. With REPAIR, only blocks of rows
    that hold a nan are computed.
    """
    # the longest rows first: short ones fill the gaps at the end
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = (head // n_heads).to(tl.int64)
    q_head = (head % n_heads).to(tl.int64)
    kv_head = q_head // GROUP
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_row = row < n
    q_mask = in_row[:, None] & (d[None, :] < HEAD_DIM)
    at = row[:, None].to(tl.int64)  # times a stride it passes 2**31
    out = head.to(tl.int64) * n + row  # in [batch, n_heads, n]
    if REPAIR:
        written = tl.load(kl_ptr + out, mask=in_row, other=0.0)
        if tl.sum((written != written).to(tl.int32)) == 0:  # no nan
            return
    qs = tl.load(
        qs_ptr + batch * stride_qs_b + q_head * stride_qs_h + at * stride_qs_n + d[None, :], mask=q_mask, other=0.0
    )
    qt = tl.load(
        qt_ptr + batch * stride_qt_b + q_head * stride_qt_h + at * stride_qt_n + d[None, :], mask=q_mask, other=0.0
    )
    ks_ptr += batch * stride_ks_b + kv_head * stride_ks_h
    kt_ptr += batch * stride_kt_b + kv_head * stride_kt_h
    row_document = row
    begin = 0
    finish = n
    if CAUSAL:
        finish = tl.minimum((block + 1) * BLOCK_M, n)
    if HAS_DOCUMENTS:
        document_ptr += batch * n
        row_document = tl.load(document_ptr + row, mask=in_row, other=-1)
        low = tl.min(tl.load(first_ptr + batch * n + row, mask=in_row, other=n), 0)
        begin = tl.maximum(low, 0) // BLOCK_N * BLOCK_N
        finish = tl.minimum(finish, tl.max(tl.load(end_ptr + batch * n + row, mask=in_row, other=0), 0))
    # finite, as -inf - -inf is nan where a row has seen nothing yet
    top_s = tl.full([BLOCK_M], -3.0e38, tl.float32)
    top_t = tl.full([BLOCK_M], -3.0e38, tl.float32)
    sum_s = tl.zeros([BLOCK_M], tl.float32)
    sum_t = tl.zeros([BLOCK_M], tl.float32)
    gap = tl.zeros([BLOCK_M], tl.float32)
    # keys that every row of the block sees need no mask
    unmasked = begin
    if not HAS_DOCUMENTS:
        if CAUSAL:
            unmasked = block * BLOCK_M // BLOCK_N * BLOCK_N
        else:
            unmasked = n // BLOCK_N * BLOCK_N
        for start in range(0, unmasked, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            k_mask = d[:, None] < HEAD_DIM
            to = col[None, :].to(tl.int64)
            # [BLOCK_D, BLOCK_N], transposed as it is loaded
            ks = tl.load(ks_ptr + to * stride_ks_n + d[:, None], mask=k_mask, other=0.0)
            kt = tl.load(kt_ptr + to * stride_kt_n + d[:, None], mask=k_mask, other=0.0)
            zs = tl.dot(qs, ks, input_precision=PRECISION)
            zt = tl.dot(qt, kt, input_precision=PRECISION)
            top_s, sum_s, top_t, sum_t, gap = _accumulate(
                zs, zt, None, top_s, sum_s, top_t, sum_t, gap, scale_s, scale_t, False
            )
    for start in range(unmasked, finish, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        k_mask = (col[None, :] < n) & (d[:, None] < HEAD_DIM)
        to = col[None, :].to(tl.int64)
        ks = tl.load(ks_ptr + to * stride_ks_n + d[:, None], mask=k_mask, other=0.0)
        kt = tl.load(kt_ptr + to * stride_kt_n + d[:, None], mask=k_mask, other=0.0)
        seen = visible(row, col, row_document, document_ptr, n, CAUSAL, HAS_DOCUMENTS)
        zs = tl.dot(qs, ks, input_precision=PRECISION)
        zt = tl.dot(qt, kt, input_precision=PRECISION)
        top_s, sum_s, top_t, sum_t, gap = _accumulate(
            zs, zt, seen, top_s, sum_s, top_t, sum_t, gap, scale_s, scale_t, True
        )
    # by its top, too: beyond scores of 1e9 the rounding of a fused multiply-add can leave a row with keys a sum of 0
    saw = (sum_t != 0) | (gap != gap) | (top_t > -3.0e38)
    log_sum_s = tl.log2(tl.where(saw, sum_s, 1.0))
    log_sum_t = tl.log2(tl.where(saw, sum_t, 1.0))
    # times ln 2: from bits to nats
    kl = (gap / tl.where(saw, sum_t, 1.0) - (log_sum_t - log_sum_s)) * 0.6931471805599453
    tl.store(kl_ptr + out, tl.where(saw, kl, 0.0), mask=in_row)
    tl.store(top_s_ptr + out, tl.where(saw, top_s, 0.0), mask=in_row)
    tl.store(top_t_ptr + out, tl.where(saw, top_t, 0.0), mask=in_row)
    tl.store(log_sum_s_ptr + out, tl.where(saw, log_sum_s, float("inf")), mask=in_row)
    tl.store(log_sum_t_ptr + out, tl.where(saw, log_sum_t, float("inf")), mask=in_row)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float, Visibility]
"""Queries and keys of the student and of the teacher, scales of student and teacher, and which keys a query sees."""


def row_kl_forward(*inputs: *Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """KL of each row, float32 [batch, n_heads, n], and the parts of its softmaxes, float32 [4, batch, n_heads, n]."""
    kl, parts = empty_results(inputs[0])
    _launch_forward(inputs, kl, parts.unbind(), repair=False)
    return kl, parts


def repair(inputs: Inputs, kl: torch.Tensor, parts: Iterable[torch.Tensor]) -> None:
    """Recompute, in place, the blocks of `kl` and `parts` in which `kl` has a nan."""
    _launch_forward(inputs, kl, parts, repair=True)


def empty_results(student_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels write: KL and parts."""
    shape = student_q.shape[:3]
    kl = torch.empty(shape, dtype=torch.float32, device=student_q.device)
    return kl, torch.empty((4, *shape), dtype=torch.float32, device=student_q.device)


def _launch_forward(inputs: Inputs, kl: torch.Tensor, parts: Iterable[torch.Tensor], repair: bool) -> None:
    student_q, student_k, teacher_q, teacher_k, student_scale, teacher_scale, visibility = inputs
    strides = (student_q.stride(), student_k.stride(), teacher_q.stride(), teacher_k.stride())
    kind = kind_of(student_q, visibility)
    launch = _launch(kind, student_k.shape[1], strides, student_scale, teacher_scale, repair)
    launch(student_q, student_k, teacher_q, teacher_k, kl, *parts, *visibility.tensors)


@lru_cache(maxsize=1024)
def _launch(
    kind: Kind,
    n_kv_heads: int,
    strides: tuple[tuple[int, ...], ...],
    student_scale: float,
    teacher_scale: float,
    repair: bool,
) -> Launch:
    batch, n_heads, n, _ = kind.shape
    options = launch_options(kind, "forward")
    return Launch(
        _row_kl_fwd_kernel,
        (triton.cdiv(n, options["BLOCK_M"]), batch * n_heads),
        (student_scale * LOG2E, teacher_scale * LOG2E, n, n_heads, *(x for each in strides for x in each[:3])),
        GROUP=n_heads // n_kv_heads,
        REPAIR=repair,
        **options,
    )
