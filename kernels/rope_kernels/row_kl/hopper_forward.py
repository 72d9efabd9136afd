"""Warp-specialised forward of `relation_kl` and `attention_map_kl` for Hopper GPUs, in Gluon, Triton's lower level.

One warp loads tiles through TMA into a ring of shared memory; two warpgroups of 64 rows each multiply and exponentiate,
so that the exponentials of one run beside the matrix products of the other. `triton_forward` has the same formulas for
every other GPU, dtype, width and visibility, and `triton_tiles` the meaning of top and log_sum.

There is no running maximum. A causal row always sees its own key, so the largest score of its diagonal tile, which
comes first, serves as top for all of its tiles: no sum can underflow, and a row where one overflows (a score 87 nats
above those near the diagonal) comes out as nan, which `triton_forward` then computes anew.

With documents a block stops at the tile of the first key that one of its rows may see. Tiles of the one document that
all of its rows are of need no mask.
"""

from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.launches import Launch
from . import triton_forward
from .hopper_tiles import (
    ROWS,
    async_load,
    describe,
    differ,
    documents_of,
    documents_of_queries,
    shared_document,
    width,
)
from .triton_tiles import LOG2E, Kind, kind_of

_BLOCK_N = 128  # keys of a tile


@gluon.jit
def _load(
    qs_desc,
    ks_desc,
    qt_desc,
    kt_desc,
    memory,
    batch,
    q_head,
    k_head,
    block,
    n_tiles,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: the block's queries once, then n_tiles tiles of keys from the diagonal down."""
    own_s, own_t, ring_s, ring_t, own_full, full, empty = memory
    mbarrier.expect(own_full, 2 * (qs_desc.block_type.nbytes + qt_desc.block_type.nbytes))
    for group in gl.static_range(2):
        row = (block * 2 + group) * ROWS
        async_load(qs_desc, [batch, q_head, row, 0], own_full, own_s.index(group))
        async_load(qt_desc, [batch, q_head, row, 0], own_full, own_t.index(group))
    for turn in range(n_tiles):
        slot = turn % STAGES
        # a barrier's phase flips each time its slot goes round; ^ 1 lets the first round pass, when all slots are free
        mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
        col = (block - turn) * BLOCK_N
        bar = full.index(slot)
        mbarrier.expect(bar, ks_desc.block_type.nbytes + kt_desc.block_type.nbytes)
        async_load(ks_desc, [batch, k_head, col, 0], bar, ring_s.index(slot))
        async_load(kt_desc, [batch, k_head, col, 0], bar, ring_t.index(slot))


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
    mbarrier.arrive(empty.index(slot), count=1)  # the tile may be overwritten
    return zs, zt


@gluon.jit
def _by_thread(x):
    """[64, n] summed to [64, 4]: four threads hold a row of a product, and each adds what it holds."""
    return gl.sum(gl.sum(gl.reshape(x, [ROWS, x.shape[1] // 8, 4, 2]), 3), 1)


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
    document_ptr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_DOCUMENTS: gl.constexpr,
):
    """One warpgroup of the forward: the diagonal tile, masked, which sets top, then the tiles before it."""
    own_s, own_t, _, _, own_full, _, _ = memory
    kl_ptr, top_s_ptr, log_sum_s_ptr, top_t_ptr, log_sum_t_ptr = out_ptrs
    scale_s, scale_t = scales
    # layout of a [64, BLOCK_N] product over the four warps of a warpgroup, 16 rows each
    Z: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row = first_row + GROUP_ID * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, Z))
    col = first_row + gl.arange(0, BLOCK_N, gl.SliceLayout(0, Z))
    seen = gl.expand_dims(col, 0) <= gl.expand_dims(row, 1)
    if HAS_DOCUMENTS:
        document = documents_of_queries(document_ptr, row, n)
        of_all_rows = shared_document(documents_of(document_ptr, first_row, n, BLOCK_N))
        of_keys = gl.load(document_ptr + col, mask=col < n, other=-1)
        seen = seen & (gl.expand_dims(of_keys, 0) == gl.expand_dims(document, 1))
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, Z)
    mbarrier.wait(own_full, 0)
    qs = own_s.index(GROUP_ID).reshape([ROWS, BLOCK_D])
    qt = own_t.index(GROUP_ID).reshape([ROWS, BLOCK_D])
    zs, zt = _scores(0, qs, qt, memory, zero, BLOCK_D, STAGES)
    top_s = gl.max(gl.where(seen, zs, -float("inf")), 1) * scale_s  # [64]
    top_t = gl.max(gl.where(seen, zt, -float("inf")), 1) * scale_t
    own_top_s = gl.expand_dims(top_s, 1)
    own_top_t = gl.expand_dims(top_t, 1)
    # an exponent so small that its exponential is 0, the same on both sides, so that the gap gets 0 * 0
    a_s = gl.where(seen, zs * scale_s - own_top_s, -1.0e4)
    a_t = gl.where(seen, zt * scale_t - own_top_t, -1.0e4)
    none = _by_thread(zero)  # sums begin at 0
    sum_s, sum_t, gap = _accumulate(a_s, a_t, none, none, none)
    for turn in range(1, n_tiles):
        if HAS_DOCUMENTS:  # read while the tensor cores multiply
            documents = documents_of(document_ptr, first_row - turn * BLOCK_N, n, BLOCK_N)
        zs, zt = _scores(turn, qs, qt, memory, zero, BLOCK_D, STAGES)
        a_s = zs * scale_s - own_top_s
        a_t = zt * scale_t - own_top_t
        if HAS_DOCUMENTS:
            if differ(documents, of_all_rows):
                of_keys = gl.load(document_ptr + (col - turn * BLOCK_N))
                seen = gl.expand_dims(of_keys, 0) == gl.expand_dims(document, 1)
                a_s = gl.where(seen, a_s, -1.0e4)
                a_t = gl.where(seen, a_t, -1.0e4)
        sum_s, sum_t, gap = _accumulate(a_s, a_t, sum_s, sum_t, gap)
    sum_s = gl.convert_layout(gl.sum(sum_s, 1), gl.SliceLayout(1, Z))
    sum_t = gl.convert_layout(gl.sum(sum_t, 1), gl.SliceLayout(1, Z))
    gap = gl.convert_layout(gl.sum(gap, 1), gl.SliceLayout(1, Z))
    log_sum_s = gl.log2(sum_s)
    log_sum_t = gl.log2(sum_t)
    # nan where a sum overflowed, as inf * 0 is
    kl = (gap / sum_t - (log_sum_t - log_sum_s)) * 0.6931471805599453 + 0.0 * (sum_s + gap)
    if HAS_DOCUMENTS:  # padding sees nothing
        saw = document >= 0
        kl = gl.where(saw, kl, 0.0)
        top_s = gl.where(saw, top_s, 0.0)
        top_t = gl.where(saw, top_t, 0.0)
        log_sum_s = gl.where(saw, log_sum_s, float("inf"))
        log_sum_t = gl.where(saw, log_sum_t, float("inf"))
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
    document_ptr,
    first_ptr,
    scale_s,
    scale_t,
    n,
    n_heads,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_DOCUMENTS: gl.constexpr,
):
    """KL and softmax parts of 128 rows, two warpgroups; tiles of 128 keys from the diagonal down to the first."""
    block = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest rows first: short ones fill the gaps at the end
    head = gl.program_id(1)
    batch = head // n_heads
    q_head = head % n_heads
    first_row = block * (2 * ROWS)
    n_tiles = block + 1
    if HAS_DOCUMENTS:
        document_ptr += batch.to(gl.int64) * n
        row = first_row + gl.arange(0, 2 * ROWS, gl.BlockedLayout([1], [32], [4], [0]))
        valid = documents_of_queries(document_ptr, row, n) >= 0
        first = gl.load(first_ptr + batch.to(gl.int64) * n + row, mask=valid, other=first_row)
        n_tiles -= gl.minimum(gl.maximum(gl.min(first, 0), 0), first_row) // BLOCK_N
    memory = shared_tiles(qs_desc, ks_desc, qt_desc, kt_desc, STAGES, 2)
    start = head.to(gl.int64) * n  # of the head's rows in [batch, n_heads, n]
    out_ptrs = (kl_ptr + start, top_s_ptr + start, log_sum_s_ptr + start, top_t_ptr + start, log_sum_t_ptr + start)
    scales = (scale_s, scale_t)
    gl.warp_specialize(
        [
            (
                _forward_group,
                (
                    0, memory, out_ptrs, first_row, scales, n, n_tiles, document_ptr, BLOCK_N, BLOCK_D, STAGES,
                    HAS_DOCUMENTS,
                ),
            ),
            (
                _forward_group,
                (
                    1, memory, out_ptrs, first_row, scales, n, n_tiles, document_ptr, BLOCK_N, BLOCK_D, STAGES,
                    HAS_DOCUMENTS,
                ),
            ),
            (
                _load,
                (
                    qs_desc, ks_desc, qt_desc, kt_desc, memory, batch, q_head, q_head // GROUP, block, n_tiles,
                    BLOCK_N, STAGES,
                ),
            ),
        ],
        # warps, and registers of a thread, of the second warpgroup and of the loader
        [4, 4],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def shared_tiles(own_s_desc, other_s_desc, own_t_desc, other_t_desc, STAGES: gl.constexpr, N_GROUPS: gl.constexpr):
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


def row_kl_forward(*inputs: *triton_forward.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`triton_forward.row_kl_forward` for what `runs_on_hopper`."""
    student_q, student_k, teacher_q, teacher_k, student_scale, teacher_scale, visibility = inputs
    kl, parts = triton_forward.empty_results(student_q)
    block_d = width(student_q.shape[-1])
    kind = kind_of(student_q, visibility)
    each_part = parts.unbind()
    launch = _launch(kind, student_k.shape[1], student_scale, teacher_scale)
    launch(
        describe(student_q, 64, block_d),
        describe(student_k, _BLOCK_N, block_d),
        describe(teacher_q, 64, block_d),
        describe(teacher_k, _BLOCK_N, block_d),
        kl,
        *each_part,
        visibility.document,
        visibility.first,
    )
    triton_forward.repair(inputs, kl, each_part)
    return kl, parts


@lru_cache(maxsize=1024)
def _launch(kind: Kind, n_kv_heads: int, student_scale: float, teacher_scale: float) -> Launch:
    batch, n_heads, n, head_dim = kind.shape
    block_d = width(head_dim)
    return Launch(
        _row_kl_hopper_fwd_kernel,
        (triton.cdiv(n, 2 * 64), batch * n_heads),
        (student_scale * LOG2E, teacher_scale * LOG2E, n, n_heads),
        GROUP=n_heads // n_kv_heads,
        BLOCK_N=_BLOCK_N,
        BLOCK_D=block_d,
        STAGES=2 if block_d == 128 else 4,
        HAS_DOCUMENTS=kind.has_documents,
        num_warps=4,
    )
