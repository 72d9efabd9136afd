"""Triton kernels of `relation_kl` and `attention_map_kl`. Imported where one of them is called on a GPU.

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

_LOG2E = 1.4426950408889634


@triton.jit
def _visible(row, col, row_document, document_ptr, n, CAUSAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """Whether queries `row` [M] see keys `col` [N], [M, N]."""
    seen = (row[:, None] < n) & (col[None, :] < n)
    if CAUSAL:
        seen &= col[None, :] <= row[:, None]
    if HAS_DOCUMENTS:
        col_document = tl.load(document_ptr + col, mask=col < n, other=-2)
        seen &= (row_document[:, None] == col_document[None, :]) & (row_document[:, None] >= 0)
    return seen


@triton.jit
def _difference(zs, zt, top_s, log_sum_s, top_t, log_sum_t, scale_s, scale_t):
    """P_student - P_teacher."""
    return tl.exp2(zs * scale_s - top_s - log_sum_s) - tl.exp2(zt * scale_t - top_t - log_sum_t)


@triton.jit
def _accumulate(zs, zt, seen, top_s, sum_s, top_t, sum_t, gap, scale_s, scale_t, MASKED: tl.constexpr):
    """Add one tile of dot products to the running softmaxes of its rows, and to gap = sum_j exp2(a_t) (a_t - a_s)."""
    if MASKED:
        zs = tl.where(seen, zs, -float("inf"))
        zt = tl.where(seen, zt, -float("inf"))
    new_s = tl.maximum(top_s, tl.max(zs, 1) * scale_s)
    new_t = tl.maximum(top_t, tl.max(zt, 1) * scale_t)
    a_s = zs * scale_s - new_s[:, None]
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
    at = row[:, None].to(tl.int64)
    out = head.to(tl.int64) * n + row
    if REPAIR:
        found = tl.load(kl_ptr + out, mask=in_row, other=0.0)
        if tl.sum((found != found).to(tl.int32)) == 0:
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
        seen = _visible(row, col, row_document, document_ptr, n, CAUSAL, HAS_DOCUMENTS)
        zs = tl.dot(qs, ks, input_precision=PRECISION)
        zt = tl.dot(qt, kt, input_precision=PRECISION)
        top_s, sum_s, top_t, sum_t, gap = _accumulate(
            zs, zt, seen, top_s, sum_s, top_t, sum_t, gap, scale_s, scale_t, True
        )
    # by its top, too: beyond scores of 1e9 the rounding of a fused multiply-add can leave a row with keys a sum of 0
    saw = (sum_t != 0) | (gap != gap) | (top_t > -3.0e38)
    log_sum_s = tl.log2(tl.where(saw, sum_s, 1.0))
    log_sum_t = tl.log2(tl.where(saw, sum_t, 1.0))
    kl = (gap / tl.where(saw, sum_t, 1.0) - (log_sum_t - log_sum_s)) * 0.6931471805599453
    tl.store(kl_ptr + out, tl.where(saw, kl, 0.0), mask=in_row)
    tl.store(top_s_ptr + out, tl.where(saw, top_s, 0.0), mask=in_row)
    tl.store(top_t_ptr + out, tl.where(saw, top_t, 0.0), mask=in_row)
    tl.store(log_sum_s_ptr + out, tl.where(saw, log_sum_s, float("inf")), mask=in_row)
    tl.store(log_sum_t_ptr + out, tl.where(saw, log_sum_t, float("inf")), mask=in_row)


@triton.jit(do_not_specialize=["n", "n_heads"])
def _relation_kl_bwd_kernel(
    s_ptr,
    t_ptr,
    top_s_ptr,
    log_sum_s_ptr,
    top_t_ptr,
    log_sum_t_ptr,
    grad_ptr,
    grad_s_ptr,
    document_ptr,
    first_ptr,
    end_ptr,
    scale_s,
    scale_t,
    factor,
    n,
    n_heads,
    stride_s_b,
    stride_s_h,
    stride_s_n,
    stride_t_b,
    stride_t_h,
    stride_t_n,
    stride_g_b,
    stride_g_h,
    stride_g_n,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient to one block of rows in both of their roles, by the symmetry of X X^T, without atomics.

    As queries they own the softmax; as keys they are read by other rows, whose softmax counts.
    With C = P_s - P_t times the rows' incoming gradient, dX_i = scale sum_j (C_ij + C_ji) X_j.
    """
    block = tl.program_id(0)  # row i meets i keys and n - i queries: all blocks take equally long
    head = tl.program_id(1)
    batch = (head // n_heads).to(tl.int64)
    own_head = (head % n_heads).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_row = row < n
    x_mask = in_row[:, None] & (d[None, :] < HEAD_DIM)
    at = row[:, None].to(tl.int64)
    s_ptr += batch * stride_s_b + own_head * stride_s_h
    t_ptr += batch * stride_t_b + own_head * stride_t_h
    rows = head.to(tl.int64) * n
    top_s_ptr += rows
    top_t_ptr += rows
    log_sum_s_ptr += rows
    log_sum_t_ptr += rows
    grad_ptr += rows
    s_i = tl.load(s_ptr + at * stride_s_n + d[None, :], mask=x_mask, other=0.0)
    t_i = tl.load(t_ptr + at * stride_t_n + d[None, :], mask=x_mask, other=0.0)
    top_s_i = tl.load(top_s_ptr + row, mask=in_row, other=0.0)
    top_t_i = tl.load(top_t_ptr + row, mask=in_row, other=0.0)
    log_sum_s_i = tl.load(log_sum_s_ptr + row, mask=in_row, other=float("inf"))
    log_sum_t_i = tl.load(log_sum_t_ptr + row, mask=in_row, other=float("inf"))
    grad_i = tl.load(grad_ptr + row, mask=in_row, other=0.0)
    row_document = row
    begin = 0
    finish = n
    if HAS_DOCUMENTS:
        document_ptr += batch * n
        row_document = tl.load(document_ptr + row, mask=in_row, other=-1)
        low = tl.min(tl.load(first_ptr + batch * n + row, mask=in_row, other=n), 0)
        begin = tl.maximum(low, 0) // BLOCK_N * BLOCK_N
        finish = tl.max(tl.load(end_ptr + batch * n + row, mask=in_row, other=0), 0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    before = begin
    after = begin
    if CAUSAL and not HAS_DOCUMENTS:
        # blocks wholly before are keys of all rows; blocks wholly after read all rows
        before = block * BLOCK_M // BLOCK_N * BLOCK_N
        after = tl.minimum(tl.cdiv((block + 1) * BLOCK_M, BLOCK_N) * BLOCK_N, n)
        for start in range(0, before, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            mask = (d[None, :] < HEAD_DIM) & (col[:, None] < n)
            to = col[:, None].to(tl.int64)
            s_j = tl.load(s_ptr + to * stride_s_n + d[None, :], mask=mask, other=0.0)
            t_j = tl.load(t_ptr + to * stride_t_n + d[None, :], mask=mask, other=0.0)
            zs = tl.dot(s_i, tl.trans(s_j), input_precision=PRECISION)
            zt = tl.dot(t_i, tl.trans(t_j), input_precision=PRECISION)
            c = (
                _difference(
                    zs,
                    zt,
                    top_s_i[:, None],
                    log_sum_s_i[:, None],
                    top_t_i[:, None],
                    log_sum_t_i[:, None],
                    scale_s,
                    scale_t,
                )
                * grad_i[:, None]
            )
            acc = tl.dot(c.to(s_j.dtype), s_j, acc, input_precision=PRECISION)
    else:
        after = finish
    for start in range(before, after, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        in_col = col < n
        mask = in_col[:, None] & (d[None, :] < HEAD_DIM)
        to = col[:, None].to(tl.int64)
        s_j = tl.load(s_ptr + to * stride_s_n + d[None, :], mask=mask, other=0.0)
        t_j = tl.load(t_ptr + to * stride_t_n + d[None, :], mask=mask, other=0.0)
        top_s_j = tl.load(top_s_ptr + col, mask=in_col, other=0.0)
        top_t_j = tl.load(top_t_ptr + col, mask=in_col, other=0.0)
        log_sum_s_j = tl.load(log_sum_s_ptr + col, mask=in_col, other=float("inf"))
        log_sum_t_j = tl.load(log_sum_t_ptr + col, mask=in_col, other=float("inf"))
        grad_j = tl.load(grad_ptr + col, mask=in_col, other=0.0)
        zs = tl.dot(s_i, tl.trans(s_j), input_precision=PRECISION)
        zt = tl.dot(t_i, tl.trans(t_j), input_precision=PRECISION)
        as_query = (
            _difference(
                zs, zt, top_s_i[:, None], log_sum_s_i[:, None], top_t_i[:, None], log_sum_t_i[:, None], scale_s, scale_t
            )
            * grad_i[:, None]
        )
        as_key = (
            _difference(
                zs, zt, top_s_j[None, :], log_sum_s_j[None, :], top_t_j[None, :], log_sum_t_j[None, :], scale_s, scale_t
            )
            * grad_j[None, :]
        )
        together = in_row[:, None] & in_col[None, :]
        if HAS_DOCUMENTS:
            col_document = tl.load(document_ptr + col, mask=in_col, other=-2)
            together &= (row_document[:, None] == col_document[None, :]) & (row_document[:, None] >= 0)
        sees = together
        is_seen = together
        if CAUSAL:
            sees = together & (col[None, :] <= row[:, None])
            is_seen = together & (col[None, :] >= row[:, None])
        # selected, not multiplied: where a pair is not visible, its exponentials may be inf
        c = tl.where(sees, as_query, 0.0) + tl.where(is_seen, as_key, 0.0)
        acc = tl.dot(c.to(s_j.dtype), s_j, acc, input_precision=PRECISION)
    for start in range(after, finish, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        in_col = col < n
        mask = in_col[:, None] & (d[None, :] < HEAD_DIM)
        to = col[:, None].to(tl.int64)
        s_j = tl.load(s_ptr + to * stride_s_n + d[None, :], mask=mask, other=0.0)
        t_j = tl.load(t_ptr + to * stride_t_n + d[None, :], mask=mask, other=0.0)
        top_s_j = tl.load(top_s_ptr + col, mask=in_col, other=0.0)
        top_t_j = tl.load(top_t_ptr + col, mask=in_col, other=0.0)
        log_sum_s_j = tl.load(log_sum_s_ptr + col, mask=in_col, other=float("inf"))
        log_sum_t_j = tl.load(log_sum_t_ptr + col, mask=in_col, other=float("inf"))
        grad_j = tl.load(grad_ptr + col, mask=in_col, other=0.0)
        zs = tl.dot(s_i, tl.trans(s_j), input_precision=PRECISION)
        zt = tl.dot(t_i, tl.trans(t_j), input_precision=PRECISION)
        c = (
            _difference(
                zs, zt, top_s_j[None, :], log_sum_s_j[None, :], top_t_j[None, :], log_sum_t_j[None, :], scale_s, scale_t
            )
            * grad_j[None, :]
        )
        acc = tl.dot(c.to(s_j.dtype), s_j, acc, input_precision=PRECISION)
    grad_s_ptr += batch * stride_g_b + own_head * stride_g_h
    tl.store(grad_s_ptr + at * stride_g_n + d[None, :], (acc * factor).to(grad_s_ptr.dtype.element_ty), mask=x_mask)


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
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = (head // n_heads).to(tl.int64)
    q_head = (head % n_heads).to(tl.int64)
    kv_head = q_head // GROUP
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_row = row < n
    q_mask = in_row[:, None] & (d[None, :] < HEAD_DIM)
    at = row[:, None].to(tl.int64)
    qs = tl.load(
        qs_ptr + batch * stride_qs_b + q_head * stride_qs_h + at * stride_qs_n + d[None, :], mask=q_mask, other=0.0
    )
    qt = tl.load(
        qt_ptr + batch * stride_qt_b + q_head * stride_qt_h + at * stride_qt_n + d[None, :], mask=q_mask, other=0.0
    )
    ks_ptr += batch * stride_ks_b + kv_head * stride_ks_h
    kt_ptr += batch * stride_kt_b + kv_head * stride_kt_h
    rows = head.to(tl.int64) * n
    top_s = tl.load(top_s_ptr + rows + row, mask=in_row, other=0.0)
    top_t = tl.load(top_t_ptr + rows + row, mask=in_row, other=0.0)
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
        low = tl.min(tl.load(first_ptr + batch * n + row, mask=in_row, other=n), 0)
        begin = tl.maximum(low, 0) // BLOCK_N * BLOCK_N
        finish = tl.minimum(finish, tl.max(tl.load(end_ptr + batch * n + row, mask=in_row, other=0), 0))
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, finish, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = (col[:, None] < n) & (d[None, :] < HEAD_DIM)
        to = col[:, None].to(tl.int64)
        ks = tl.load(ks_ptr + to * stride_ks_n + d[None, :], mask=mask, other=0.0)
        kt = tl.load(kt_ptr + to * stride_kt_n + d[None, :], mask=mask, other=0.0)
        zs = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
        zt = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
        seen = _visible(row, col, row_document, document_ptr, n, CAUSAL, HAS_DOCUMENTS)
        c = (
            _difference(
                zs, zt, top_s[:, None], log_sum_s[:, None], top_t[:, None], log_sum_t[:, None], scale_s, scale_t
            )
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
        begin = block * BLOCK_M // BLOCK_N * BLOCK_N
    if HAS_DOCUMENTS:
        document_ptr += batch * n
        low = tl.min(tl.load(first_ptr + batch * n + col, mask=in_col, other=n), 0)
        begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
        finish = tl.max(tl.load(end_ptr + batch * n + col, mask=in_col, other=0), 0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for member in range(GROUP):
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
            seen = _visible(row, col, row_document, document_ptr, n, CAUSAL, HAS_DOCUMENTS)
            zs = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
            zt = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)
            c = (
                _difference(
                    zs, zt, top_s[:, None], log_sum_s[:, None], top_t[:, None], log_sum_t[:, None], scale_s, scale_t
                )
                * grad[:, None]
            )
            c = tl.where(seen, c, 0.0).to(qs.dtype)
            acc = tl.dot(tl.trans(c), qs, acc, input_precision=PRECISION)
    grad_k_ptr += batch * stride_g_b + kv_head * stride_g_h
    tl.store(grad_k_ptr + to * stride_g_n + d[None, :], (acc * factor).to(grad_k_ptr.dtype.element_ty), mask=k_mask)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float, Visibility]
"""Queries and keys of the student and of the teacher, scales of student and teacher, and which keys a query sees."""


def row_kl_forward(*inputs: *Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """KL of each row, float32 [batch, n_heads, n], and the parts of its softmaxes, float32 [4, batch, n_heads, n]."""
    kl = torch.empty(inputs[0].shape[:3], dtype=torch.float32, device=inputs[0].device)
    parts = torch.empty(4, *kl.shape, dtype=torch.float32, device=kl.device)
    _launch_forward(inputs, kl, parts, repair=False)
    return kl, parts


def repair(inputs: Inputs, kl: torch.Tensor, parts: torch.Tensor) -> None:
    """Compute anew, in place, the rows of `kl` and `parts` near a nan of `kl`, as `row_kl_forward` does all."""
    _launch_forward(inputs, kl, parts, repair=True)


def _launch_forward(inputs: Inputs, kl: torch.Tensor, parts: torch.Tensor, repair: bool) -> None:
    student_q, student_k, teacher_q, teacher_k, student_scale, teacher_scale, visibility = inputs
    batch, n_heads, n, _ = student_q.shape
    options = _options(student_q, visibility, "forward")
    _row_kl_fwd_kernel[(triton.cdiv(n, options["BLOCK_M"]), batch * n_heads)](
        student_q,
        student_k,
        teacher_q,
        teacher_k,
        kl,
        *parts,
        *visibility.tensors,
        student_scale * _LOG2E,
        teacher_scale * _LOG2E,
        n,
        n_heads,
        *student_q.stride()[:3],
        *student_k.stride()[:3],
        *teacher_q.stride()[:3],
        *teacher_k.stride()[:3],
        GROUP=n_heads // student_k.shape[1],
        REPAIR=repair,
        **options,
    )


def relation_kl_backward(
    grad: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    parts: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    visibility: Visibility,
) -> torch.Tensor:
    """Gradient to `student` in its dtype and layout, given float32 `grad` [batch, n_heads, n]."""
    batch, n_heads, n, _ = student.shape
    grad_s = torch.empty_like(student)
    options = _options(student, visibility, "backward")
    _relation_kl_bwd_kernel[(triton.cdiv(n, options["BLOCK_M"]), batch * n_heads)](
        student,
        teacher,
        *parts,
        grad.contiguous(),
        grad_s,
        *visibility.tensors,
        student_scale * _LOG2E,
        teacher_scale * _LOG2E,
        student_scale,
        n,
        n_heads,
        *student.stride()[:3],
        *teacher.stride()[:3],
        *grad_s.stride()[:3],
        **options,
    )
    return grad_s


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
    batch, n_heads, n, _ = student_q.shape
    n_kv_heads = student_k.shape[1]
    grad_q, grad_k = torch.empty_like(student_q), torch.empty_like(student_k)
    options = _options(student_q, visibility, "backward")
    tiles = triton.cdiv(n, options["BLOCK_M"])
    for kernel, out, heads in (
        (_attention_kl_dq_kernel, grad_q, n_heads),
        (_attention_kl_dk_kernel, grad_k, n_kv_heads),
    ):
        kernel[(tiles, batch * heads)](
            student_q,
            student_k,
            teacher_q,
            teacher_k,
            *parts,
            grad.contiguous(),
            out,
            *visibility.tensors,
            student_scale * _LOG2E,
            teacher_scale * _LOG2E,
            student_scale,
            n,
            n_heads,
            *student_q.stride()[:3],
            *student_k.stride()[:3],
            *teacher_q.stride()[:3],
            *teacher_k.stride()[:3],
            *out.stride()[:3],
            GROUP=n_heads // n_kv_heads,
            **options,
        )
    return grad_q, grad_k


def _options(x: torch.Tensor, visibility: Visibility, stage: str) -> dict[str, Any]:
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
