"""Warp-specialised backward of `relation_kl` for Hopper GPUs, in Gluon, by symmetry and without atomics.

One warp loads tiles through TMA into a ring of shared memory; warpgroups of 64 rows each multiply and exponentiate, as
in `row_kl_hopper`. A block gathers all of its rows' gradient, as queries of what is before and as keys of the rest.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .row_kl_hopper import LOG2E, ROWS, async_load, describe, shared_tiles, width
from .visibility import Visibility


@gluon.jit
def _load(
    s_i_desc,
    s_j_desc,
    t_i_desc,
    t_j_desc,
    memory,
    batch,
    head,
    first_row,
    n_tiles,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
):
    """The loading warp: the block's own rows once, then all tiles."""
    own_s, own_t, ring_s, ring_t, own_full, full, empty = memory
    mbarrier.expect(own_full, N_GROUPS * (s_i_desc.block_type.nbytes + t_i_desc.block_type.nbytes))
    for group in gl.static_range(N_GROUPS):
        row = first_row + group * ROWS
        async_load(s_i_desc, [batch, head, row, 0], own_full, own_s.index(group))
        async_load(t_i_desc, [batch, head, row, 0], own_full, own_t.index(group))
    for tile in range(n_tiles):
        slot = tile % STAGES
        mbarrier.wait(empty.index(slot), ((tile // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, s_j_desc.block_type.nbytes + t_j_desc.block_type.nbytes)
        async_load(s_j_desc, [batch, head, tile * BLOCK_N, 0], bar, ring_s.index(slot))
        async_load(t_j_desc, [batch, head, tile * BLOCK_N, 0], bar, ring_t.index(slot))


@gluon.jit
def _difference(zs, zt, shift_s, shift_t, scale_s, scale_t):
    """P_student - P_teacher."""
    return gl.exp2(zs * scale_s + shift_s) - gl.exp2(zt * scale_t + shift_t)


@gluon.jit
def _backward_tile(
    ROLE: gl.constexpr,
    tile,
    s_i,
    t_i,
    memory,
    acc,
    c,
    zero,
    row,
    own_parts,
    part_ptrs,
    scales,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Add C X of the tile before to acc and form C of this one, so that a turn has three products in flight.

    ROLE is that of the warpgroup's rows: "query", where they own the softmax and the caller multiplies by their
    gradient, "key", where the tile's rows do, "both".
    """
    _, _, ring_s, ring_t, _, full, empty = memory
    shift_s_i, shift_t_i, grad_i = own_parts
    shift_s_ptr, shift_t_ptr, grad_ptr = part_ptrs
    scale_s, scale_t = scales
    BLOCK_N: gl.constexpr = zero.shape[1]
    col = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, zero.type.layout))
    if ROLE != "query":
        # before the products, which hide the time that they take
        shift_s_j = gl.expand_dims(gl.load(shift_s_ptr + col), 0)
        shift_t_j = gl.expand_dims(gl.load(shift_t_ptr + col), 0)
        grad_j = gl.expand_dims(gl.load(grad_ptr + col), 0)
    slot = tile % STAGES
    before = gl.maximum(tile - 1, 0) % STAGES  # c is 0 at the first tile
    mbarrier.wait(full.index(slot), (tile // STAGES) & 1)
    s_j = ring_s.index(slot).reshape([BLOCK_N, BLOCK_D])
    t_j = ring_t.index(slot).reshape([BLOCK_N, BLOCK_D])
    operand = gl.convert_layout(c, gl.DotOperandLayout(0, acc.type.layout, 2)).to(ring_s.dtype)
    acc = warpgroup_mma(operand, ring_s.index(before).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
    zs = warpgroup_mma(s_i, s_j.permute((1, 0)), zero, use_acc=False, is_async=True)
    zt = warpgroup_mma(t_i, t_j.permute((1, 0)), zero, use_acc=False, is_async=True)
    acc, operand, zs, zt = warpgroup_mma_wait(0, deps=[acc, operand, zs, zt])
    mbarrier.arrive(empty.index(before), count=1, pred=tile > 0)
    if ROLE == "query":
        difference = _difference(zs, zt, shift_s_i, shift_t_i, scale_s, scale_t)
    elif ROLE == "key":
        difference = _difference(zs, zt, shift_s_j, shift_t_j, scale_s, scale_t) * grad_j
    else:
        i = gl.expand_dims(row, 1)
        j = gl.expand_dims(col, 0)
        shift_s = gl.where(j <= i, shift_s_i, shift_s_j)
        shift_t = gl.where(j <= i, shift_t_i, shift_t_j)
        difference = _difference(zs, zt, shift_s, shift_t, scale_s, scale_t) * gl.where(j <= i, grad_i, grad_j)
        difference = gl.where(j == i, 2.0 * difference, difference)
    return acc, difference


@gluon.jit
def _backward_group(
    GROUP_ID: gl.constexpr,
    memory,
    part_ptrs,
    out_ptr,
    stride_out,
    first_row,
    scales,
    factor,
    n,
    n_tiles,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup of the backward: its rows as queries of what is before, then both, then as keys of the rest."""
    own_s, own_t, ring_s, _, own_full, _, _ = memory
    shift_s_ptr, shift_t_ptr, grad_ptr = part_ptrs
    Z: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dtype: gl.constexpr = own_s.dtype
    row = first_row + GROUP_ID * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, Z))
    shift_s = gl.expand_dims(gl.load(shift_s_ptr + row), 1)
    shift_t = gl.expand_dims(gl.load(shift_t_ptr + row), 1)
    grad = gl.expand_dims(gl.load(grad_ptr + row), 1)
    own_parts = (shift_s, shift_t, grad)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, Z)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, ACC)
    c = zero
    mbarrier.wait(own_full, 0)
    s_i = own_s.index(GROUP_ID).reshape([ROWS, BLOCK_D])
    t_i = own_t.index(GROUP_ID).reshape([ROWS, BLOCK_D])
    gl.static_assert(BLOCK_N == ROWS, "a warpgroup has one diagonal tile")
    # a warpgroup wholly behind the end has no diagonal tile
    diagonal = gl.minimum(first_row // BLOCK_N + GROUP_ID, n_tiles)
    for tile in range(0, diagonal):
        acc, c = _backward_tile(
            "query", tile, s_i, t_i, memory, acc, c, zero, row, own_parts, part_ptrs, scales, BLOCK_D, STAGES
        )
    # the gradient of these rows, once for all tiles before, in which they own the softmax
    at = first_row + GROUP_ID * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    acc *= gl.expand_dims(gl.load(grad_ptr + at), 1)
    c *= grad
    if diagonal < n_tiles:
        acc, c = _backward_tile(
            "both", diagonal, s_i, t_i, memory, acc, c, zero, row, own_parts, part_ptrs, scales, BLOCK_D, STAGES
        )
    for tile in range(diagonal + 1, n_tiles):
        acc, c = _backward_tile(
            "key", tile, s_i, t_i, memory, acc, c, zero, row, own_parts, part_ptrs, scales, BLOCK_D, STAGES
        )
    operand = gl.convert_layout(c, gl.DotOperandLayout(0, ACC, 2)).to(dtype)
    acc = warpgroup_mma(operand, ring_s.index((n_tiles - 1) % STAGES).reshape([BLOCK_N, BLOCK_D]), acc)
    d = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, ACC)), 0)
    out = out_ptr + gl.expand_dims(at.to(gl.int64) * stride_out, 1) + d
    gl.store(out, (acc * factor).to(dtype), mask=gl.expand_dims(at < n, 1) & (d < HEAD_DIM))


@gluon.jit(do_not_specialize=["n", "n_heads"])
def _relation_kl_hopper_bwd_kernel(
    s_i_desc,
    s_j_desc,
    t_i_desc,
    t_j_desc,
    shift_s_ptr,
    shift_t_ptr,
    grad_ptr,
    out_ptr,
    padded_n,
    stride_b,
    stride_h,
    stride_n,
    scale_s,
    scale_t,
    factor,
    n,
    n_heads,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
):
    """Gradient to 64 N_GROUPS rows in both of their roles; all blocks take equally long.

    With C = P_s - P_t times the rows' incoming gradient, dX_i = factor sum_j (C_ij + C_ji) X_j, without atomics.
    """
    first_row = gl.program_id(0) * (N_GROUPS * ROWS)
    head = gl.program_id(1)
    batch = head // n_heads
    own = head % n_heads
    n_tiles = gl.cdiv(n, BLOCK_N)
    memory = shared_tiles(s_i_desc, s_j_desc, t_i_desc, t_j_desc, STAGES, N_GROUPS)
    start = head.to(gl.int64) * padded_n
    part_ptrs = (shift_s_ptr + start, shift_t_ptr + start, grad_ptr + start)
    out_ptr += batch.to(gl.int64) * stride_b + own.to(gl.int64) * stride_h
    scales = (scale_s, scale_t)
    if N_GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _backward_group,
                    (
                        0, memory, part_ptrs, out_ptr, stride_n, first_row, scales, factor, n, n_tiles, HEAD_DIM,
                        BLOCK_N, BLOCK_D, STAGES,
                    ),
                ),
                (
                    _backward_group,
                    (
                        1, memory, part_ptrs, out_ptr, stride_n, first_row, scales, factor, n, n_tiles, HEAD_DIM,
                        BLOCK_N, BLOCK_D, STAGES,
                    ),
                ),
                (
                    _load,
                    (
                        s_i_desc, s_j_desc, t_i_desc, t_j_desc, memory, batch, own, first_row, n_tiles, BLOCK_N, STAGES,
                        N_GROUPS,
                    ),
                ),
            ],
            [4, 4],
            [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(N_GROUPS == 3)
        gl.warp_specialize(
            [
                (
                    _backward_group,
                    (
                        0, memory, part_ptrs, out_ptr, stride_n, first_row, scales, factor, n, n_tiles, HEAD_DIM,
                        BLOCK_N, BLOCK_D, STAGES,
                    ),
                ),
                (
                    _backward_group,
                    (
                        1, memory, part_ptrs, out_ptr, stride_n, first_row, scales, factor, n, n_tiles, HEAD_DIM,
                        BLOCK_N, BLOCK_D, STAGES,
                    ),
                ),
                (
                    _backward_group,
                    (
                        2, memory, part_ptrs, out_ptr, stride_n, first_row, scales, factor, n, n_tiles, HEAD_DIM,
                        BLOCK_N, BLOCK_D, STAGES,
                    ),
                ),
                (
                    _load,
                    (
                        s_i_desc, s_j_desc, t_i_desc, t_j_desc, memory, batch, own, first_row, n_tiles, BLOCK_N, STAGES,
                        N_GROUPS,
                    ),
                ),
            ],
            [4, 4, 4],
            [160, 160, 24],
        )  # fmt: skip


def relation_kl_backward(
    grad: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    parts: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    visibility: Visibility,
) -> torch.Tensor:
    """`row_kl_triton.relation_kl_backward` for what `runs_on_hopper`.

    One number a row and side, top + log_sum, is exact enough for 16-bit inputs, and leaves registers for the products.
    """
    batch, n_heads, n, head_dim = student.shape
    grad_s = torch.empty_like(student)
    block_d, block_n = width(head_dim), 64
    n_groups = 2 if block_d == 128 else 3
    blocks = triton.cdiv(n, 64 * n_groups)
    # whole blocks, so that the kernel needs no masks: behind the end all probabilities are 0
    padded = parts.new_empty(3, batch, n_heads, blocks * 64 * n_groups)
    padded[:2, ..., :n] = -(parts[0::2] + parts[1::2])  # negated here, as the kernel would in every tile
    padded[2, ..., :n] = grad
    padded[:2, ..., n:] = -float("inf")
    padded[2, ..., n:] = 0.0
    _relation_kl_hopper_bwd_kernel[(blocks, batch * n_heads)](
        describe(student, 64, block_d),
        describe(student, block_n, block_d),
        describe(teacher, 64, block_d),
        describe(teacher, block_n, block_d),
        *padded,
        grad_s,
        padded.shape[-1],
        *grad_s.stride()[:3],
        student_scale * LOG2E,
        teacher_scale * LOG2E,
        student_scale,
        n,
        n_heads,
        HEAD_DIM=head_dim,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        STAGES=4,
        N_GROUPS=n_groups,
        num_warps=4,
    )
    return grad_s
