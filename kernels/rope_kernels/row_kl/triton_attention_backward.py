"""Triton backward of `attention_map_kl`: one kernel for the gradient to queries, one for that to keys."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.launches import Launch
from .triton_tiles import LOG2E, Kind, difference, kind_of, launch_options, visible
from .visibility import Visibility


@triton.jit(do_not_specialize=["n", "n_heads"])
def _attention_kl_dq_kernel(
    qs_ptr,
    ks_ptr,
    qt_ptr,
    kt_ptr,
    top_s_ptr,
    log_sum_s_ptr,
    top_t_ptr,
    log_sum_t_ptr,
    grad_ptr,
    grad_q_ptr,
    document_ptr,
    first_ptr,
    end_ptr,
    scale_s,
    scale_t,
    factor,
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
    stride_g_b,
    stride_g_h,
    stride_g_n,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient to one block of queries: dQ_i = scale g_i sum_j (P_s - P_t)_ij K_j."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    batch = (head // n_heads).to(tl.int64)
    q_head = (head % n_heads).to(tl.int64)
    kv_head = q_head // GROUP
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_row = row < n
    q_mask = in_row[:, None] & (d[None, :] < HEAD_DIM)
    at = row[:, None].to(tl.int64)  # times a stride it passes 2**31
    qs = tl.load(
        qs_ptr + batch * stride_qs_b + q_head * stride_qs_h + at * stride_qs_n + d[None, :], mask=q_mask, other=0.0
    )
    qt = tl.load(
        qt_ptr + batch * stride_qt_b + q_head * stride_qt_h + at * stride_qt_n + d[None, :], mask=q_mask, other=0.0
    )
    ks_ptr += batch * stride_ks_b + kv_head * stride_ks_h
    kt_ptr += batch * stride_kt_b + kv_head * stride_kt_h
    rows = head.to(tl.int64) * n  # the head's rows in [batch, n_heads, n]
    top_s = tl.load(top_s_ptr + rows + row, mask=in_row, other=0.0)
    top_t = tl.load(top_t_ptr + rows + row, mask=in_row, other=0.0)
    # inf: rows behind the end have probabilities of 0
    log_sum_s = tl.load(log_sum_s_ptr + rows + row, mask=in_row, other=float("inf"))
    log_sum_t = tl.load(log_sum_t_ptr + rows + row, mask=in_row, other=float("inf"))
    grad = tl.load(grad_ptr + rows + row, mask=in_row, other=0.0)
    row_document = row
    begin = 0
    finish = n
    if CAUSAL:
        finish = tl.minimum((block + 1) * BLOCK_M, n)
    if HAS_DOCUMENTS:
        document_ptr += batch * n
        row_document = tl.load(document_ptr + row, mask=in_row, other=-1)
        # the tiles of keys that some row of the block can meet
        low = tl.min(tl.load(first_ptr + batch * n + row, mask=in_row, other=n), 0)
        begin = tl.maximum(low, 0) // BLOCK_N * BLOCK_N
        finish = tl.minimum(finish, tl.max(tl.load(end_ptr + batch * n + row, mask=in_row, other=0), 0))
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # sum_j C_ij K_j
    for start in range(begin, finish, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = (col[:, None] < n) & (d[None, :] < HEAD_DIM)
        to = col[:, None].to(tl.int64)
        ks = tl.load(ks_ptr + to * stride_ks_n + d[None, :], mask=mask, other=0.0)
        kt = tl.load(kt_ptr + to * stride_kt_n + d[None, :], mask=mask, other=0.0)
        zs = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
        zt = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        seen = visible(row, col, row_document, document_ptr, n, CAUSAL, HAS_DOCUMENTS)
        c = (
            difference(zs, zt, top_s[:, None], log_sum_s[:, None], top_t[:, None], log_sum_t[:, None], scale_s, scale_t)
            * grad[:, None]
        )
        acc = tl.dot(tl.where(seen, c, 0.0).to(ks.dtype), ks, acc, input_precision=PRECISION)
    grad_q_ptr += batch * stride_g_b + q_head * stride_g_h
    tl.store(grad_q_ptr + at * stride_g_n + d[None, :], (acc * factor).to(grad_q_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["n", "n_heads"])
def _attention_kl_dk_kernel(
    qs_ptr,
    ks_ptr,
    qt_ptr,
    kt_ptr,
    top_s_ptr,
    log_sum_s_ptr,
    top_t_ptr,
    log_sum_t_ptr,
    grad_ptr,
    grad_k_ptr,
    document_ptr,
    first_ptr,
    end_ptr,
    scale_s,
    scale_t,
    factor,
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
    stride_g_b,
    stride_g_h,
    stride_g_n,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient to one block of keys: dK_j = scale sum_i g_i (P_s - P_t)_ij Q_i, over all heads that share the key."""
    block = tl.program_id(0)
    n_kv_heads = n_heads // GROUP
    batch = (tl.program_id(1) // n_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % n_kv_heads).to(tl.int64)
    col = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_col = col < n
    k_mask = in_col[:, None] & (d[None, :] < HEAD_DIM)
    to = col[:, None].to(tl.int64)
    ks = tl.load(
        ks_ptr + batch * stride_ks_b + kv_head * stride_ks_h + to * stride_ks_n + d[None, :], mask=k_mask, other=0.0
    )
    kt = tl.load(
        kt_ptr + batch * stride_kt_b + kv_head * stride_kt_h + to * stride_kt_n + d[None, :], mask=k_mask, other=0.0
    )
    begin = 0
    finish = n
    if CAUSAL:
        begin = block * BLOCK_M // BLOCK_N * BLOCK_N  # earlier queries do not see the block's keys
    if HAS_DOCUMENTS:
        document_ptr += batch * n
        low = tl.min(tl.load(first_ptr + batch * n + col, mask=in_col, other=n), 0)
        begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
        finish = tl.max(tl.load(end_ptr + batch * n + col, mask=in_col, other=0), 0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # sum_i C_ij Q_i
    for member in range(GROUP):  # one after the other, without atomics, so that sums are the same in every run
        q_head = kv_head * GROUP + member
        qs_head = qs_ptr + batch * stride_qs_b + q_head * stride_qs_h
        qt_head = qt_ptr + batch * stride_qt_b + q_head * stride_qt_h
        rows = (batch * n_heads + q_head) * n
        for start in range(begin, finish, BLOCK_N):
            row = start + tl.arange(0, BLOCK_N)
            in_row = row < n
            mask = in_row[:, None] & (d[None, :] < HEAD_DIM)
            at = row[:, None].to(tl.int64)
            qs = tl.load(qs_head + at * stride_qs_n + d[None, :], mask=mask, other=0.0)
            qt = tl.load(qt_head + at * stride_qt_n + d[None, :], mask=mask, other=0.0)
            top_s = tl.load(top_s_ptr + rows + row, mask=in_row, other=0.0)
            top_t = tl.load(top_t_ptr + rows + row, mask=in_row, other=0.0)
            log_sum_s = tl.load(log_sum_s_ptr + rows + row, mask=in_row, other=float("inf"))
            log_sum_t = tl.load(log_sum_t_ptr + rows + row, mask=in_row, other=float("inf"))
            grad = tl.load(grad_ptr + rows + row, mask=in_row, other=0.0)
            row_document = row
            if HAS_DOCUMENTS:
                row_document = tl.load(document_ptr + row, mask=in_row, other=-1)
            seen = visible(row, col, row_document, document_ptr, n, CAUSAL, HAS_DOCUMENTS)
            zs = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
            zt = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
            c = (
                difference(
                    zs, zt, top_s[:, None], log_sum_s[:, None], top_t[:, None], log_sum_t[:, None], scale_s, scale_t
                )
                * grad[:, None]
            )
            c = tl.where(seen, c, 0.0).to(qs.dtype)
            acc = tl.dot(tl.trans(c), qs, acc, input_precision=PRECISION)
    grad_k_ptr += batch * stride_g_b + kv_head * stride_g_h
    tl.store(grad_k_ptr + to * stride_g_n + d[None, :], (acc * factor).to(grad_k_ptr.dtype.element_ty), mask=k_mask)


def attention_map_kl_backward(
    grad: torch.Tensor,
    student_q: torch.Tensor,
    student_k: torch.Tensor,
    teacher_q: torch.Tensor,
    teacher_k: torch.Tensor,
    parts: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    visibility: Visibility,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients to `student_q` and `student_k` in their dtype and layout, given float32 `grad` [batch, n_heads, n]."""
    inputs = (student_q, student_k, teacher_q, teacher_k)
    grads = torch.empty_like(student_q), torch.empty_like(student_k)
    strides = tuple(x.stride() for x in (*inputs, *grads))
    launches = _launches(kind_of(student_q, visibility), student_k.shape[1], strides, student_scale, teacher_scale)
    for launch, out in zip(launches, grads, strict=True):
        launch(*inputs, *parts.unbind(), grad.contiguous(), out, *visibility.tensors)
    return grads


@lru_cache(maxsize=1024)
def _launches(
    kind: Kind, n_kv_heads: int, strides: tuple[tuple[int, ...], ...], student_scale: float, teacher_scale: float
) -> tuple[Launch, Launch]:
    """Of the gradient to queries, and of that to keys."""
    batch, n_heads, n, _ = kind.shape
    options = launch_options(kind, "backward")
    scales = (student_scale * LOG2E, teacher_scale * LOG2E, student_scale)
    *of_inputs, of_queries, of_keys = (stride[:3] for stride in strides)

    def launch(kernel: Any, heads: int, of_out: tuple[int, ...]) -> Launch:
        grid = (triton.cdiv(n, options["BLOCK_M"]), batch * heads)
        steps = (x for each in (*of_inputs, of_out) for x in each)
        return Launch(kernel, grid, (*scales, n, n_heads, *steps), GROUP=n_heads // n_kv_heads, **options)

    return launch(_attention_kl_dq_kernel, n_heads, of_queries), launch(_attention_kl_dk_kernel, n_kv_heads, of_keys)
