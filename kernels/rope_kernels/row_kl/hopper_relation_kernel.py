"""Warp-specialised backward of `relation_kl` for Hopper GPUs, in Gluon: each tile of the causal half once, with roles.

With C_ij = w_i (P_student - P_teacher)_ij of a query i and a key j, w_i its incoming gradient, the gradient is

    dX_j = scale (sum_i C_ij X_i + sum_k C_jk X_k),

the first sum over the rows that see j, the second over those that j sees. A block owns 64 N_GROUPS keys j and walks the
tiles of queries i from its diagonal to the end. One warp loads; N_GROUPS warpgroups form C of 64 keys each and leave it
in shared memory; one warpgroup multiplies it, C^T X into registers for the keys and C X for the queries of the tile.

The queries' part adds up over blocks, in an order that no one controls. So that every run gives the same bits, it is
added as 32-bit integers, by TMA, in units so small that a row's sum can never overflow: sum_j |P_s - P_t|_ij <= 2.
Where C is to be multiplied from shared memory, shared memory's own bandwidth bounds the kernel, not the tensor cores.

With documents a block stops at the tile of the last query that may see one of its keys. Where a group's keys are all of
one document, which few groups' are not, behind the diagonal the document of a query alone says whether it sees them.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_tiles import ROWS, async_load, documents_of, documents_of_queries, shared_document


@builtin
def _reduce_add(descriptor, coord, source, _semantic=None):
    """Add a tile of shared memory to global memory through TMA (`tma.async_atomic_add` of Triton 3.8)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coord, source.handle)


@gluon.jit
def _load(
    s_desc,
    t_desc,
    memory,
    batch,
    head,
    first_tile,
    n_turns,
    S_STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
):
    """The loading warp: the block's keys once, then tiles of queries from the diagonal on."""
    own_s, own_t, ring_s, ring_t, _, own_full, s_full, s_empty, t_full, t_empty, _, _ = memory
    mbarrier.expect(own_full, N_GROUPS * (s_desc.block_type.nbytes + t_desc.block_type.nbytes))
    for group in gl.static_range(N_GROUPS):
        row = (first_tile + group) * ROWS
        async_load(s_desc, [batch, head, row, 0], own_full, own_s.index(group))
        async_load(t_desc, [batch, head, row, 0], own_full, own_t.index(group))
    for turn in range(n_turns):
        row = (first_tile + turn) * ROWS
        slot = turn % S_STAGES
        # the phase of a barrier flips each round of its ring; ^ 1 lets the first round pass, when all slots are free
        mbarrier.wait(s_empty.index(slot), ((turn // S_STAGES) & 1) ^ 1)
        mbarrier.expect(s_full.index(slot), s_desc.block_type.nbytes)
        async_load(s_desc, [batch, head, row, 0], s_full.index(slot), ring_s.index(slot))
        slot = turn % T_STAGES
        mbarrier.wait(t_empty.index(slot), ((turn // T_STAGES) & 1) ^ 1)
        mbarrier.expect(t_full.index(slot), t_desc.block_type.nbytes)
        async_load(t_desc, [batch, head, row, 0], t_full.index(slot), ring_t.index(slot))


@gluon.jit
def _student_scores(turn, s_j, memory, zero, S_STAGES: gl.constexpr):
    """Begin the student's dot products of the tile of this turn, [64 queries, 64 keys]."""
    _, _, ring_s, _, _, _, s_full, _, _, _, _, _ = memory
    slot = turn % S_STAGES
    mbarrier.wait(s_full.index(slot), (turn // S_STAGES) & 1)
    s_i = ring_s.index(slot).reshape(s_j.shape)
    return warpgroup_mma(s_i, s_j.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _difference_tile(
    turn,
    n_turns,
    first_tile,
    zs,
    s_j,
    t_j,
    memory,
    zero,
    row_j,
    part_ptrs,
    scales,
    borders,
    GROUP_ID: gl.constexpr,
    DIAGONAL: gl.constexpr,
    S_STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
    HAS_DOCUMENTS: gl.constexpr,
):
    """C of one tile to shared memory, given the student's scores; returns those of the next tile.

    The teacher's product runs beside the student's exponentials, and the next student's beside the teacher's.
    """
    _, _, _, ring_t, c_ring, _, _, s_empty, t_full, t_empty, c_full, c_empty = memory
    shift_s_ptr, shift_t_ptr, weight_ptr = part_ptrs
    scale_s, scale_t = scales
    document_ptr, n, of_all_keys = borders
    row_i = (first_tile + turn) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, zero.type.layout))
    if HAS_DOCUMENTS:
        of_queries = gl.expand_dims(documents_of_queries(document_ptr, row_i, n), 1)
    shift_s = gl.expand_dims(gl.load(shift_s_ptr + row_i), 1)
    shift_t = gl.expand_dims(gl.load(shift_t_ptr + row_i), 1)
    weight = gl.expand_dims(gl.load(weight_ptr + row_i), 1)
    slot = turn % T_STAGES
    mbarrier.wait(t_full.index(slot), (turn // T_STAGES) & 1)
    t_i = ring_t.index(slot).reshape(t_j.shape)
    zt = warpgroup_mma(t_i, t_j.permute((1, 0)), zero, use_acc=False, is_async=True)
    p = gl.exp2(zs * scale_s + shift_s)  # P_student, while the tensor cores multiply the teacher's tile
    zt = warpgroup_mma_wait(0, deps=[zt])
    mbarrier.arrive(t_empty.index(slot), count=1)
    # the last turn multiplies its own tile once more, which nobody reads
    zs = _student_scores(gl.minimum(turn + 1, n_turns - 1), s_j, memory, zero, S_STAGES)
    c = (p - gl.exp2(zt * scale_t + shift_t)) * weight
    if DIAGONAL:
        c = gl.where(gl.expand_dims(row_j, 0) <= gl.expand_dims(row_i, 1), c, 0.0)
    # selected, not multiplied: where a pair is not visible, its exponentials may be inf
    if HAS_DOCUMENTS and DIAGONAL:
        if of_all_keys == -2:
            of_keys = gl.load(document_ptr + row_j, mask=row_j < n, other=-1)
            c = gl.where(gl.expand_dims(of_keys, 0) == of_queries, c, 0.0)
        else:
            c = gl.where(of_queries == of_all_keys, c, 0.0)
    elif HAS_DOCUMENTS:
        c = gl.where(of_queries == of_all_keys, c, 0.0)
    buffer = turn & 1  # two tiles of C: one is formed while the other is multiplied
    mbarrier.wait(c_empty.index(buffer), ((turn >> 1) & 1) ^ 1)
    c_ring.index(buffer * N_GROUPS + GROUP_ID).store(c.to(c_ring.dtype))
    fence_async_shared()
    mbarrier.arrive(c_full.index(buffer), count=1)
    zs = warpgroup_mma_wait(0, deps=[zs])
    mbarrier.arrive(s_empty.index(turn % S_STAGES), count=1)
    return zs


@gluon.jit
def _differences(
    GROUP_ID: gl.constexpr,
    memory,
    part_ptrs,
    scales,
    first_tile,
    n_turns,
    document_ptr,
    n,
    BLOCK_D: gl.constexpr,
    S_STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
    HAS_DOCUMENTS: gl.constexpr,
):
    """A warpgroup that forms C of its 64 keys, tile by tile of queries; the first tiles hold the diagonal."""
    own_s, own_t, _, _, _, own_full, _, _, _, _, _, _ = memory
    Z: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row_j = (first_tile + GROUP_ID) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, Z))
    zero = gl.zeros([ROWS, ROWS], gl.float32, Z)
    of_all_keys = 0
    if HAS_DOCUMENTS:
        of_all_keys = shared_document(documents_of(document_ptr, (first_tile + GROUP_ID) * ROWS, n, ROWS))
    borders = (document_ptr, n, of_all_keys)
    mbarrier.wait(own_full, 0)
    s_j = own_s.index(GROUP_ID).reshape([ROWS, BLOCK_D])
    t_j = own_t.index(GROUP_ID).reshape([ROWS, BLOCK_D])
    diagonal = gl.minimum(n_turns, N_GROUPS)  # later tiles of queries see all of the block's keys
    if HAS_DOCUMENTS:
        diagonal = gl.where(of_all_keys == -2, n_turns, diagonal)
    zs = warpgroup_mma_wait(0, deps=[_student_scores(0, s_j, memory, zero, S_STAGES)])
    for turn in range(0, diagonal):
        zs = _difference_tile(
            turn, n_turns, first_tile, zs, s_j, t_j, memory, zero, row_j, part_ptrs, scales, borders, GROUP_ID, True,
            S_STAGES, T_STAGES, N_GROUPS, HAS_DOCUMENTS,
        )  # fmt: skip
    for turn in range(diagonal, n_turns):
        zs = _difference_tile(
            turn, n_turns, first_tile, zs, s_j, t_j, memory, zero, row_j, part_ptrs, scales, borders, GROUP_ID, False,
            S_STAGES, T_STAGES, N_GROUPS, HAS_DOCUMENTS,
        )  # fmt: skip


@gluon.jit
def _gradients(
    memory,
    staging,
    quantum_ptr,
    sum_desc,
    sum_row,
    out_ptr,
    stride_out,
    first_tile,
    n_turns,
    n,
    factor,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    S_STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
):
    """The warpgroup that multiplies C: C^T X to registers for its keys, C X in integers to memory for the queries."""
    own_s, _, ring_s, _, c_ring, own_full, _, s_empty, _, _, c_full, c_empty = memory
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    zero = gl.zeros([ROWS, BLOCK_D], gl.float32, ACC)
    acc_0 = zero  # C^T X of the first 64 keys, [64, BLOCK_D]; acc_1 and acc_2 of the next
    acc_1 = zero
    acc_2 = zero
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    mbarrier.wait(own_full, 0)
    x_0 = own_s.index(0).reshape([ROWS, BLOCK_D])
    x_1 = own_s.index(1).reshape([ROWS, BLOCK_D])
    for turn in range(n_turns):
        slot = turn % S_STAGES
        buffer = turn & 1
        quantum = gl.expand_dims(gl.load(quantum_ptr + (first_tile + turn) * ROWS + row), 1)  # [64, 1]
        mbarrier.wait(c_full.index(buffer), (turn >> 1) & 1)
        x_i = ring_s.index(slot).reshape([ROWS, BLOCK_D])
        c_0 = c_ring.index(buffer * N_GROUPS)
        c_1 = c_ring.index(buffer * N_GROUPS + 1)
        part = warpgroup_mma(c_0, x_0, zero, use_acc=False, is_async=True)  # C X of the tile's queries
        part = warpgroup_mma(c_1, x_1, part, is_async=True)
        if N_GROUPS == 3:
            c_2 = c_ring.index(buffer * N_GROUPS + 2)
            part = warpgroup_mma(c_2, own_s.index(2).reshape([ROWS, BLOCK_D]), part, is_async=True)
        acc_0 = warpgroup_mma(c_0.permute((1, 0)), x_i, acc_0, is_async=True)
        acc_1 = warpgroup_mma(c_1.permute((1, 0)), x_i, acc_1, is_async=True)
        if N_GROUPS == 3:
            acc_2 = warpgroup_mma(c_2.permute((1, 0)), x_i, acc_2, is_async=True)
        part = warpgroup_mma_wait(N_GROUPS, deps=[part])  # those to acc run on
        # float32 to the nearest int32
        whole = gl.inline_asm_elementwise(
            "cvt.rni.s32.f32 $0, $1;", "=r,f", [part * quantum], dtype=gl.int32, is_pure=True, pack=1
        )
        out = staging.index(turn % OUT_STAGES)
        tma.store_wait(OUT_STAGES - 1)  # until the buffer that is written next has been read
        out.store(whole)
        fence_async_shared()
        _reduce_add(sum_desc, [sum_row + (first_tile + turn) * ROWS, 0], out)
        if N_GROUPS == 3:
            acc_0, acc_1, acc_2 = warpgroup_mma_wait(0, deps=[acc_0, acc_1, acc_2])
        else:
            acc_0, acc_1 = warpgroup_mma_wait(0, deps=[acc_0, acc_1])
        mbarrier.arrive(s_empty.index(slot), count=1)
        mbarrier.arrive(c_empty.index(buffer), count=1)
    tma.store_wait(0)  # shared memory must live until the last sums are out
    row += first_tile * ROWS
    _write(acc_0, out_ptr, stride_out, row, n, factor, own_s.dtype, HEAD_DIM)
    _write(acc_1, out_ptr, stride_out, row + ROWS, n, factor, own_s.dtype, HEAD_DIM)
    if N_GROUPS == 3:
        _write(acc_2, out_ptr, stride_out, row + 2 * ROWS, n, factor, own_s.dtype, HEAD_DIM)


@gluon.jit
def _write(acc, out_ptr, stride_out, row, n, factor, dtype: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The keys' part of 64 rows, times factor."""
    d = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)), 0)
    at = out_ptr + gl.expand_dims(row.to(gl.int64) * stride_out, 1) + d
    gl.store(at, (acc * factor).to(dtype), mask=gl.expand_dims(row < n, 1) & (d < HEAD_DIM))


@gluon.jit
def _shared(s_desc, t_desc, S_STAGES: gl.constexpr, T_STAGES: gl.constexpr, N_GROUPS: gl.constexpr):
    """Shared memory of keys, of both rings of queries and of the ring of C, each with barriers: filled, free."""
    dtype: gl.constexpr = s_desc.dtype
    own_s = gl.allocate_shared_memory(dtype, [N_GROUPS] + s_desc.block_shape, s_desc.layout)
    own_t = gl.allocate_shared_memory(dtype, [N_GROUPS] + t_desc.block_shape, t_desc.layout)
    ring_s = gl.allocate_shared_memory(dtype, [S_STAGES] + s_desc.block_shape, s_desc.layout)
    ring_t = gl.allocate_shared_memory(dtype, [T_STAGES] + t_desc.block_shape, t_desc.layout)
    c_ring = gl.allocate_shared_memory(dtype, [2 * N_GROUPS, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, 2))
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [S_STAGES, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [S_STAGES, 1], mbarrier.MBarrierLayout())
    t_full = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], mbarrier.MBarrierLayout())
    t_empty = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for slot in gl.static_range(S_STAGES):
        mbarrier.init(s_full.index(slot), count=1)
        mbarrier.init(s_empty.index(slot), count=N_GROUPS + 1)  # who forms C and who multiplies it
    for slot in gl.static_range(T_STAGES):
        mbarrier.init(t_full.index(slot), count=1)
        mbarrier.init(t_empty.index(slot), count=N_GROUPS)
    for buffer in gl.static_range(2):
        mbarrier.init(c_full.index(buffer), count=N_GROUPS)
        mbarrier.init(c_empty.index(buffer), count=1)
    fence_async_shared()
    return own_s, own_t, ring_s, ring_t, c_ring, own_full, s_full, s_empty, t_full, t_empty, c_full, c_empty


@gluon.jit(do_not_specialize=["n", "n_heads", "first_head", "launch_heads"])
def relation_kl_hopper_bwd_kernel(
    s_desc,
    t_desc,
    shift_s_ptr,
    shift_t_ptr,
    weight_ptr,
    quantum_ptr,
    top_ptr,
    document_ptr,
    end_ptr,
    sum_desc,
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
    first_head,
    launch_heads,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    S_STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr,
    N_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    HAS_DOCUMENTS: gl.constexpr,
):
    """The keys' part of 64 N_GROUPS rows to `out`, and what they give to the queries' part to the integer sums."""
    # heads side by side, the longest blocks of all first: short ones fill the gaps at the end
    in_launch = gl.program_id(0) % launch_heads
    first_tile = gl.program_id(0) // launch_heads * N_GROUPS
    head = first_head + in_launch
    batch = head // n_heads
    own_head = head % n_heads
    n_turns = gl.cdiv(n, ROWS) - first_tile  # tiles of queries from the diagonal to the end
    if HAS_DOCUMENTS:
        document_ptr += batch.to(gl.int64) * n
        key = first_tile * ROWS + gl.arange(0, 4 * ROWS, gl.BlockedLayout([2], [32], [4], [0]))
        own = (key < n) & (key < (first_tile + N_GROUPS) * ROWS)
        valid = gl.load(document_ptr + key, mask=own, other=-1) >= 0  # nothing sees padding
        end = gl.load(end_ptr + batch.to(gl.int64) * n + key, mask=valid, other=0)
        n_turns = gl.maximum(gl.minimum(gl.cdiv(gl.max(end, 0), ROWS) - first_tile, n_turns), 1)
    memory = _shared(s_desc, t_desc, S_STAGES, T_STAGES, N_GROUPS)
    staging = gl.allocate_shared_memory(gl.int32, [OUT_STAGES] + sum_desc.block_shape, sum_desc.layout)
    start = head.to(gl.int64) * padded_n
    part_ptrs = (shift_s_ptr + start, shift_t_ptr + start, weight_ptr + start)
    quantum_ptr += start
    out_ptr += batch.to(gl.int64) * stride_b + own_head.to(gl.int64) * stride_h
    factor *= gl.load(top_ptr + head)
    scales = (scale_s, scale_t)
    if N_GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _gradients,
                    (
                        memory, staging, quantum_ptr, sum_desc, in_launch * padded_n, out_ptr, stride_n, first_tile,
                        n_turns, n, factor, HEAD_DIM, BLOCK_D, S_STAGES, OUT_STAGES, N_GROUPS,
                    ),
                ),
                (
                    _differences,
                    (
                        0, memory, part_ptrs, scales, first_tile, n_turns, document_ptr, n, BLOCK_D, S_STAGES,
                        T_STAGES, N_GROUPS, HAS_DOCUMENTS,
                    ),
                ),
                (
                    _differences,
                    (
                        1, memory, part_ptrs, scales, first_tile, n_turns, document_ptr, n, BLOCK_D, S_STAGES,
                        T_STAGES, N_GROUPS, HAS_DOCUMENTS,
                    ),
                ),
                (_load, (s_desc, t_desc, memory, batch, own_head, first_tile, n_turns, S_STAGES, T_STAGES, N_GROUPS)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.static_assert(N_GROUPS == 3)
        gl.warp_specialize(
            [
                (
                    _gradients,
                    (
                        memory, staging, quantum_ptr, sum_desc, in_launch * padded_n, out_ptr, stride_n, first_tile,
                        n_turns, n, factor, HEAD_DIM, BLOCK_D, S_STAGES, OUT_STAGES, N_GROUPS,
                    ),
                ),
                (
                    _differences,
                    (
                        0, memory, part_ptrs, scales, first_tile, n_turns, document_ptr, n, BLOCK_D, S_STAGES,
                        T_STAGES, N_GROUPS, HAS_DOCUMENTS,
                    ),
                ),
                (
                    _differences,
                    (
                        1, memory, part_ptrs, scales, first_tile, n_turns, document_ptr, n, BLOCK_D, S_STAGES,
                        T_STAGES, N_GROUPS, HAS_DOCUMENTS,
                    ),
                ),
                (
                    _differences,
                    (
                        2, memory, part_ptrs, scales, first_tile, n_turns, document_ptr, n, BLOCK_D, S_STAGES,
                        T_STAGES, N_GROUPS, HAS_DOCUMENTS,
                    ),
                ),
                (_load, (s_desc, t_desc, memory, batch, own_head, first_tile, n_turns, S_STAGES, T_STAGES, N_GROUPS)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip
