"""Triton backward of `relation_kl`: the gradient to rows that are queries and keys at once."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..common.launches import Launch
from .triton_tiles import LOG2E, Kind, difference, kind_of, launch_options
from .visibility import Visibility


@triton.jit
def _sweep(
    acc,
    begin,
    finish,
    own_tile,
    pointers,
    numbers,
    row,
    row_document,
    document_ptr,
    AS_QUERIES: tl.constexpr,
    AS_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add sum_j C_ij X_j of a block's rows i to `acc` [M, D], over tiles of rows j with begin <= j < finish.

    AS_QUERIES: the block's rows see rows j, and their own softmax counts. AS_KEYS: rows j see them, and that of rows j
    counts. With one of both it is so for every pair; with both it depends on the pair, by causality and documents.

    `own` holds X of student and teacher [M, D], top and log_sum of both and the incoming gradient [M]; `pointers` the
    same of all rows of the head; `numbers` the strides of a row and the scales of both, and how many rows there are.
    """
    s_i, t_i, top_s_i, log_sum_s_i, top_t_i, log_sum_t_i, grad_i = own_tile
    s_ptr, t_ptr, top_s_ptr, log_sum_s_ptr, top_t_ptr, log_sum_t_ptr, grad_ptr = pointers
    stride_s_n, stride_t_n, scale_s, scale_t, n = numbers
    d = tl.arange(0, acc.shape[1])
    for start in range(begin, finish, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        in_col = col < n
        mask = in_col[:, None] & (d[None, :] < HEAD_DIM)
        to = col[:, None].to(tl.int64)
        s_j = tl.load(s_ptr + to * stride_s_n + d[None, :], mask=mask, other=0.0)
        t_j = tl.load(t_ptr + to * stride_t_n + d[None, :], mask=mask, other=0.0)
        if AS_KEYS:
            top_s_j = tl.load(top_s_ptr + col, mask=in_col, other=0.0)
            top_t_j = tl.load(top_t_ptr + col, mask=in_col, other=0.0)
            log_sum_s_j = tl.load(log_sum_s_ptr + col, mask=in_col, other=float("inf"))
            log_sum_t_j = tl.load(log_sum_t_ptr + col, mask=in_col, other=float("inf"))
            grad_j = tl.load(grad_ptr + col, mask=in_col, other=0.0)
        # [M, N]; z_ij = z_ji, so that one product serves both roles
        zs = tl.dot(s_i, tl.trans(s_j), input_precision=PRECISION)
        zt = tl.dot(t_i, tl.trans(t_j), input_precision=PRECISION)
        if AS_QUERIES:
            top_s, log_sum_s = top_s_i[:, None], log_sum_s_i[:, None]
            top_t, log_sum_t = top_t_i[:, None], log_sum_t_i[:, None]
            c = difference(zs, zt, top_s, log_sum_s, top_t, log_sum_t, scale_s, scale_t) * grad_i[:, None]
        if AS_KEYS:
            top_s, log_sum_s = top_s_j[None, :], log_sum_s_j[None, :]
            top_t, log_sum_t = top_t_j[None, :], log_sum_t_j[None, :]
            # C_ji, by the softmax of rows j
            as_key = difference(zs, zt, top_s, log_sum_s, top_t, log_sum_t, scale_s, scale_t) * grad_j[None, :]
            if AS_QUERIES:
                together = (row < n)[:, None] & in_col[None, :]
                if HAS_DOCUMENTS:
                    col_document = tl.load(document_ptr + col, mask=in_col, other=-2)
                    together &= (row_document[:, None] == col_document[None, :]) & (row_document[:, None] >= 0)
                sees = together
                is_seen = together
                if CAUSAL:
                    sees = together & (col[None, :] <= row[:, None])
                    is_seen = together & (col[None, :] >= row[:, None])
                # selected, not multiplied: where a pair is not visible, its exponentials may be inf
                c = tl.where(sees, c, 0.0) + tl.where(is_seen, as_key, 0.0)
            else:
                c = as_key
        acc = tl.dot(c.to(s_j.dtype), s_j, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["n", "n_heads", "padded_n"])
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
    unit_ptr,
    padded_n,
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
    REPAIR: tl.constexpr,
):
    """Gradient to one block of rows in both of their roles, by the symmetry of X X^T, without atomics.

    As queries they own the softmax; as keys they are read by other rows, whose softmax counts.
    With C = P_s - P_t times the rows' incoming gradient, dX_i = scale sum_j (C_ij + C_ji) X_j. With REPAIR, only heads
    whose unit is not finite are computed.
    """
    block = tl.program_id(0)  # row i meets i keys and n - i queries: all blocks take equally long
    head = tl.program_id(1)
    if REPAIR:
        unit = tl.load(unit_ptr + head.to(tl.int64) * padded_n)
        if tl.abs(unit) < float("inf"):  # which nan is not
            return
    batch = (head // n_heads).to(tl.int64)
    own_head = (head % n_heads).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_row = row < n
    x_mask = in_row[:, None] & (d[None, :] < HEAD_DIM)
    at = row[:, None].to(tl.int64)  # times a stride it passes 2**31
    s_ptr += batch * stride_s_b + own_head * stride_s_h
    t_ptr += batch * stride_t_b + own_head * stride_t_h
    rows = head.to(tl.int64) * n  # the head's rows in [batch, n_heads, n]
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
        # the tiles that some row of the block can meet
        low = tl.min(tl.load(first_ptr + batch * n + row, mask=in_row, other=n), 0)
        begin = tl.maximum(low, 0) // BLOCK_N * BLOCK_N
        finish = tl.max(tl.load(end_ptr + batch * n + row, mask=in_row, other=0), 0)
    own_tile = (s_i, t_i, top_s_i, log_sum_s_i, top_t_i, log_sum_t_i, grad_i)
    pointers = (s_ptr, t_ptr, top_s_ptr, log_sum_s_ptr, top_t_ptr, log_sum_t_ptr, grad_ptr)
    numbers = (stride_s_n, stride_t_n, scale_s, scale_t, n)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    before = begin
    after = finish
    if CAUSAL and not HAS_DOCUMENTS:
        # blocks wholly before are keys of all rows; blocks wholly after read all rows
        before = block * BLOCK_M // BLOCK_N * BLOCK_N
        after = tl.minimum(tl.cdiv((block + 1) * BLOCK_M, BLOCK_N) * BLOCK_N, n)
        acc = _sweep(
            acc, begin, before, own_tile, pointers, numbers, row, row_document, document_ptr, True, False,
            HEAD_DIM, CAUSAL, HAS_DOCUMENTS, BLOCK_N, PRECISION,
        )  # fmt: skip
    acc = _sweep(
        acc, before, after, own_tile, pointers, numbers, row, row_document, document_ptr, True, True,
        HEAD_DIM, CAUSAL, HAS_DOCUMENTS, BLOCK_N, PRECISION,
    )  # fmt: skip
    if CAUSAL and not HAS_DOCUMENTS:
        acc = _sweep(
            acc, after, finish, own_tile, pointers, numbers, row, row_document, document_ptr, False, True,
            HEAD_DIM, CAUSAL, HAS_DOCUMENTS, BLOCK_N, PRECISION,
        )  # fmt: skip
    grad_s_ptr += batch * stride_g_b + own_head * stride_g_h
    tl.store(grad_s_ptr + at * stride_g_n + d[None, :], (acc * factor).to(grad_s_ptr.dtype.element_ty), mask=x_mask)


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
    grad_s = torch.empty_like(student)
    inputs = (grad.contiguous(), student, teacher, parts, student_scale, teacher_scale, visibility)
    _launch_backward(inputs, grad_s, None)
    return grad_s


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float, Visibility]
"""Arguments of `relation_kl_backward`, the gradient contiguous."""


def repair(inputs: Inputs, grad_s: torch.Tensor, unit: torch.Tensor) -> None:
    """Recompute, in place, the gradient of heads whose first `unit`, [batch * n_heads, padded_n], is not finite."""
    _launch_backward(inputs, grad_s, unit)


def _launch_backward(inputs: Inputs, grad_s: torch.Tensor, unit: torch.Tensor | None) -> None:
    grad, student, teacher, parts, student_scale, teacher_scale, visibility = inputs
    strides = (student.stride(), teacher.stride(), grad_s.stride())
    padded_n = None if unit is None else unit.shape[1]
    launch = _launch(kind_of(student, visibility), strides, student_scale, teacher_scale, padded_n)
    launch(student, teacher, *parts.unbind(), grad, grad_s, *visibility.tensors, unit)


@lru_cache(maxsize=1024)
def _launch(
    kind: Kind, strides: tuple[tuple[int, ...], ...], student_scale: float, teacher_scale: float, padded_n: int | None
) -> Launch:
    batch, n_heads, n, _ = kind.shape
    options = launch_options(kind, "backward")
    scales = (student_scale * LOG2E, teacher_scale * LOG2E, student_scale)
    return Launch(
        _relation_kl_bwd_kernel,
        (triton.cdiv(n, options["BLOCK_M"]), batch * n_heads),
        (padded_n or 0, *scales, n, n_heads, *(x for each in strides for x in each[:3])),
        REPAIR=padded_n is not None,
        **options,
    )
