"""Warp-specialised kernels of `relation_kl` and `attention_map_kl` for Hopper GPUs, in Gluon, Triton's lower level.

One warp loads tiles through TMA into a ring of shared memory; warpgroups of 64 rows each multiply and exponentiate, so
that the exponentials of one run beside the matrix products of another. `row_kl_triton` has the same formulas for every
other GPU, dtype, width and visibility, and its docstring the meaning of top and log_sum.

The forward has no running maximum. A causal row always sees its own key, so the largest score of its diagonal tile,
which comes first, serves as top for all of its tiles: no sum can underflow, and a row where one overflows (a score 87
nats above those near the diagonal) comes out as nan, which `row_kl_triton` then computes anew.
"""

from functools import cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import row_kl_triton
from .visibility import Visibility

_LOG2E = 1.4426950408889634
_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# rows of a warpgroup, the fewest that its matrix product takes
_ROWS: gl.constexpr = gl.constexpr(64)


def runs_on_hopper(tensors: tuple[torch.Tensor, ...], visibility: Visibility) -> bool:
    """Whether these kernels take the inputs: Hopper, 16 bits, head_dim up to 128, causal, no borders, aligned."""
    x = tensors[0]
    return (
        x.is_cuda
        and _is_hopper(x.device)
        and x.dtype in _GLUON_DTYPES
        and x.shape[-1] <= 128
        and visibility.causal
        and visibility.document is None
        and all(_fits_tma(y) for y in tensors)
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _fits_tma(x: torch.Tensor) -> bool:
    """16-byte alignment of the start and of every stride that is walked."""
    steps = [stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(step % 8 == 0 and step > 0 for step in steps)


@gluon.jit
def _load(
    own_s_desc,
    other_s_desc,
    own_t_desc,
    other_t_desc,
    memory,
    batch,
    own_head,
    other_head,
    first_row,
    first_tile,
    step,
    n_tiles,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
):
    """The loading warp: the block's own rows once, then n_tiles tiles of the others from first_tile on."""
    own_s, own_t, ring_s, ring_t, own_full, full, empty = memory
    mbarrier.expect(own_full, N_GROUPS * (own_s_desc.block_type.nbytes + own_t_desc.block_type.nbytes))
    for group in gl.static_range(N_GROUPS):
        row = first_row + group * _ROWS
        tma.async_copy_global_to_shared(own_s_desc, [batch, own_head, row, 0], own_full, own_s.index(group))
        tma.async_copy_global_to_shared(own_t_desc, [batch, own_head, row, 0], own_full, own_t.index(group))
    for turn in range(n_tiles):
        slot = turn % STAGES
        mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
        col = (first_tile + turn * step) * BLOCK_N
        bar = full.index(slot)
        mbarrier.expect(bar, other_s_desc.block_type.nbytes + other_t_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(other_s_desc, [batch, other_head, col, 0], bar, ring_s.index(slot))
        tma.async_copy_global_to_shared(other_t_desc, [batch, other_head, col, 0], bar, ring_t.index(slot))


@gluon.jit
def _scores(turn, qs, qt, memory, zero, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Dot products of a warpgroup's rows with the tile of this turn, both sides, [64, BLOCK_N] float32."""
    _, _, ring_s, ring_t, _, full, empty = memory
    BLOCK_N: gl.constexpr = zero.shape[1]
    slot = turn % STAGES
    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
    ks = ring_s.index(slot).reshape([BLOCK_N, BLOCK_D])
    kt = ring_t.index(slot).reshape([BLOCK_N, BLOCK_D])
    zs = warpgroup_mma(qs, ks.permute((1, 0)), zero, use_acc=False, is_async=True)
    zt = warpgroup_mma(qt, kt.permute((1, 0)), zero, use_acc=False, is_async=True)
    zs, zt = warpgroup_mma_wait(0, deps=[zs, zt])
    mbarrier.arrive(empty.index(slot), count=1)
    return zs, zt


@gluon.jit
def _by_thread(x):
    """[64, n] summed to [64, 4]: four threads hold a row of a product, and each adds what it holds."""
    return gl.sum(gl.sum(gl.reshape(x, [_ROWS, x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _accumulate(a_s, a_t, sum_s, sum_t, gap):
    """Add a tile of exponents a = z scale - top to the sums of a row, and to gap = sum_j exp2(a_t) (a_t - a_s)."""
    p = gl.exp2(a_t)
    sum_s += _by_thread(gl.exp2(a_s))
    sum_t += _by_thread(p)
    gap += _by_thread(p * (a_t - a_s))
    return sum_s, sum_t, gap


@gluon.jit
def _forward_group(
    GROUP_ID: gl.constexpr,
    memory,
    out_ptrs,
    first_row,
    scales,
    n,
    n_tiles,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup of the forward: the diagonal tile, masked, which sets top, then all tiles before it."""
    own_s, own_t, _, _, own_full, _, _ = memory
    kl_ptr, top_s_ptr, log_sum_s_ptr, top_t_ptr, log_sum_t_ptr = out_ptrs
    scale_s, scale_t = scales
    Z: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row = first_row + GROUP_ID * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, Z))
    col = (n_tiles - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, Z))
    seen = gl.expand_dims(col, 0) <= gl.expand_dims(row, 1)
    zero = gl.zeros([_ROWS, BLOCK_N], gl.float32, Z)
    mbarrier.wait(own_full, 0)
    qs = own_s.index(GROUP_ID).reshape([_ROWS, BLOCK_D])
    qt = own_t.index(GROUP_ID).reshape([_ROWS, BLOCK_D])
    zs, zt = _scores(0, qs, qt, memory, zero, BLOCK_D, STAGES)
    top_s = gl.max(gl.where(seen, zs, -float("inf")), 1) * scale_s
    top_t = gl.max(gl.where(seen, zt, -float("inf")), 1) * scale_t
    own_top_s = gl.expand_dims(top_s, 1)
    own_top_t = gl.expand_dims(top_t, 1)
    # an exponent so small that its exponential is 0, the same on both sides, so that the gap gets 0 * 0
    a_s = gl.where(seen, zs * scale_s - own_top_s, -1.0e4)
    a_t = gl.where(seen, zt * scale_t - own_top_t, -1.0e4)
    none = _by_thread(zero)
    sum_s, sum_t, gap = _accumulate(a_s, a_t, none, none, none)
    for turn in range(1, n_tiles):
        zs, zt = _scores(turn, qs, qt, memory, zero, BLOCK_D, STAGES)
        a_s = zs * scale_s - own_top_s
        a_t = zt * scale_t - own_top_t
        sum_s, sum_t, gap = _accumulate(a_s, a_t, sum_s, sum_t, gap)
    sum_s = gl.convert_layout(gl.sum(sum_s, 1), gl.SliceLayout(1, Z))
    sum_t = gl.convert_layout(gl.sum(sum_t, 1), gl.SliceLayout(1, Z))
    gap = gl.convert_layout(gl.sum(gap, 1), gl.SliceLayout(1, Z))
    log_sum_s = gl.log2(sum_s)
    log_sum_t = gl.log2(sum_t)
    # nan where a sum overflowed, as inf * 0 is
    kl = (gap / sum_t - (log_sum_t - log_sum_s)) * 0.6931471805599453 + 0.0 * (sum_s + gap)
    in_row = row < n
    gl.store(kl_ptr + row, kl, mask=in_row)
    gl.store(top_s_ptr + row, top_s, mask=in_row)
    gl.store(log_sum_s_ptr + row, log_sum_s, mask=in_row)
    gl.store(top_t_ptr + row, top_t, mask=in_row)
    gl.store(log_sum_t_ptr + row, log_sum_t, mask=in_row)


@gluon.jit(do_not_specialize=["n", "n_heads"])
def _row_kl_hopper_fwd_kernel(
    qs_desc,
    ks_desc,
    qt_desc,
    kt_desc,
    kl_ptr,
    top_s_ptr,
    log_sum_s_ptr,
    top_t_ptr,
    log_sum_t_ptr,
    scale_s,
    scale_t,
    n,
    n_heads,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """KL and softmax parts of 128 rows, two warpgroups; tiles of 128 keys from the diagonal down to the first."""
    block = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest rows first: short ones fill the gaps at the end
    head = gl.program_id(1)
    batch = head // n_heads
    q_head = head % n_heads
    first_row = block * (2 * _ROWS)
    n_tiles = block + 1
    memory = _shared(qs_desc, ks_desc, qt_desc, kt_desc, STAGES, 2)
    start = head.to(gl.int64) * n
    out_ptrs = (kl_ptr + start, top_s_ptr + start, log_sum_s_ptr + start, top_t_ptr + start, log_sum_t_ptr + start)
    scales = (scale_s, scale_t)
    gl.warp_specialize(
        [
            (_forward_group, (0, memory, out_ptrs, first_row, scales, n, n_tiles, BLOCK_N, BLOCK_D, STAGES)),
            (_forward_group, (1, memory, out_ptrs, first_row, scales, n, n_tiles, BLOCK_N, BLOCK_D, STAGES)),
            (
                _load,
                (
                    qs_desc, ks_desc, qt_desc, kt_desc, memory, batch, q_head, q_head // GROUP, first_row, block, -1,
                    n_tiles, BLOCK_N, STAGES, 2,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _shared(own_s_desc, other_s_desc, own_t_desc, other_t_desc, STAGES: gl.constexpr, N_GROUPS: gl.constexpr):
    """Shared memory of the block's own rows and of the ring, with barriers: own rows there, slot filled, slot free."""
    dtype: gl.constexpr = own_s_desc.dtype
    own_s = gl.allocate_shared_memory(dtype, [N_GROUPS] + own_s_desc.block_shape, own_s_desc.layout)
    own_t = gl.allocate_shared_memory(dtype, [N_GROUPS] + own_t_desc.block_shape, own_t_desc.layout)
    ring_s = gl.allocate_shared_memory(dtype, [STAGES] + other_s_desc.block_shape, other_s_desc.layout)
    ring_t = gl.allocate_shared_memory(dtype, [STAGES] + other_t_desc.block_shape, other_t_desc.layout)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=N_GROUPS)
    fence_async_shared()
    return own_s, own_t, ring_s, ring_t, own_full, full, empty


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
    row = first_row + GROUP_ID * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, Z))
    shift_s = gl.expand_dims(gl.load(shift_s_ptr + row), 1)
    shift_t = gl.expand_dims(gl.load(shift_t_ptr + row), 1)
    grad = gl.expand_dims(gl.load(grad_ptr + row), 1)
    own_parts = (shift_s, shift_t, grad)
    zero = gl.zeros([_ROWS, BLOCK_N], gl.float32, Z)
    acc = gl.zeros([_ROWS, BLOCK_D], gl.float32, ACC)
    c = zero
    mbarrier.wait(own_full, 0)
    s_i = own_s.index(GROUP_ID).reshape([_ROWS, BLOCK_D])
    t_i = own_t.index(GROUP_ID).reshape([_ROWS, BLOCK_D])
    gl.static_assert(BLOCK_N == _ROWS, "a warpgroup has one diagonal tile")
    # a warpgroup wholly behind the end has no diagonal tile
    diagonal = gl.minimum(first_row // BLOCK_N + GROUP_ID, n_tiles)
    for tile in range(0, diagonal):
        acc, c = _backward_tile(
            "query", tile, s_i, t_i, memory, acc, c, zero, row, own_parts, part_ptrs, scales, BLOCK_D, STAGES
        )
    # the gradient of these rows, once for all tiles before, in which they own the softmax
    at = first_row + GROUP_ID * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, ACC))
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
    first_row = gl.program_id(0) * (N_GROUPS * _ROWS)
    head = gl.program_id(1)
    batch = head // n_heads
    own = head % n_heads
    n_tiles = gl.cdiv(n, BLOCK_N)
    memory = _shared(s_i_desc, s_j_desc, t_i_desc, t_j_desc, STAGES, N_GROUPS)
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
                        s_i_desc, s_j_desc, t_i_desc, t_j_desc, memory, batch, own, own, first_row, 0, 1, n_tiles,
                        BLOCK_N, STAGES, N_GROUPS,
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
                        s_i_desc, s_j_desc, t_i_desc, t_j_desc, memory, batch, own, own, first_row, 0, 1, n_tiles,
                        BLOCK_N, STAGES, N_GROUPS,
                    ),
                ),
            ],
            [4, 4, 4],
            [160, 160, 24],
        )  # fmt: skip


def row_kl_forward(*inputs: *row_kl_triton.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_kl_triton.row_kl_forward` for what `runs_on_hopper`."""
    student_q, student_k, teacher_q, teacher_k, student_scale, teacher_scale, _ = inputs
    batch, n_heads, n, head_dim = student_q.shape
    kl = torch.empty(batch, n_heads, n, dtype=torch.float32, device=student_q.device)
    parts = torch.empty(4, *kl.shape, dtype=torch.float32, device=kl.device)
    block_d, block_n = _width(head_dim), 128
    _row_kl_hopper_fwd_kernel[(triton.cdiv(n, 128), batch * n_heads)](
        _describe(student_q, 64, block_d),
        _describe(student_k, block_n, block_d),
        _describe(teacher_q, 64, block_d),
        _describe(teacher_k, block_n, block_d),
        kl,
        *parts,
        student_scale * _LOG2E,
        teacher_scale * _LOG2E,
        n,
        n_heads,
        GROUP=n_heads // student_k.shape[1],
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        STAGES=2 if block_d == 128 else 4,
        num_warps=4,
    )
    row_kl_triton.repair(inputs, kl, parts)
    return kl, parts


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
    block_d, block_n = _width(head_dim), 64
    n_groups = 2 if block_d == 128 else 3
    blocks = triton.cdiv(n, 64 * n_groups)
    # whole blocks, so that the kernel needs no masks: behind the end all probabilities are 0
    padded = parts.new_empty(3, batch, n_heads, blocks * 64 * n_groups)
    padded[:2, ..., :n] = -(parts[0::2] + parts[1::2])  # negated here, as the kernel would in every tile
    padded[2, ..., :n] = grad
    padded[:2, ..., n:] = -float("inf")
    padded[2, ..., n:] = 0.0
    _relation_kl_hopper_bwd_kernel[(blocks, batch * n_heads)](
        _describe(student, 64, block_d),
        _describe(student, block_n, block_d),
        _describe(teacher, 64, block_d),
        _describe(teacher, block_n, block_d),
        *padded,
        grad_s,
        padded.shape[-1],
        *grad_s.stride()[:3],
        student_scale * _LOG2E,
        teacher_scale * _LOG2E,
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


def _width(head_dim: int) -> int:
    """Features of a tile: TMA fills what is behind head_dim with zeros."""
    return 64 if head_dim <= 64 else 128


def _describe(x: torch.Tensor, rows: int, block_d: int) -> Any:
    """TMA's description of `rows` tokens of one head of [batch, n_heads, n, head_dim]."""
    # the stride of a dimension of one element is arbitrary in torch, and checked by TMA
    strides = [stride if size > 1 else block_d for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, block_d], _layout(rows, block_d, x.dtype))


@cache
def _layout(rows: int, block_d: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d], _GLUON_DTYPES[dtype])
