"""Runs the Hopper kernels of `rope_kernels.row_kl` without a GPU: their own code, over torch tensors.

Each program's partitions are threads that meet at barriers as warps do, so that a walk that differs between them, or a
slot that is never freed, ends in an error. Loads and stores outside of their tensors do, too. What only the GPU has is
missing: layouts, asynchronous copies and products, the order in which blocks add.
"""

import inspect
import threading
import types

import torch

WAIT = 60  # seconds at a barrier, after which it is a deadlock


class Block(torch.Tensor):
    """A tensor of a kernel, which `+=` does not change in place."""

    __iadd__ = torch.Tensor.__add__
    __isub__ = torch.Tensor.__sub__
    __imul__ = torch.Tensor.__mul__
    type = types.SimpleNamespace(layout=None)


def block(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Block)


class Pointer:
    """Elements of a tensor's memory."""

    def __init__(self, memory, at):
        self.memory, self.at = memory, at
        self.dtype = memory.dtype

    def __add__(self, steps):
        return Pointer(self.memory, self.at + steps)

    def checked(self, mask):
        mask = torch.broadcast_to(torch.as_tensor(True if mask is None else mask), self.at.shape)
        assert ((self.at >= 0) & (self.at < len(self.memory)) | ~mask).all(), "outside of the tensor"
        return mask

    def load(self, mask=None, other=0):
        mask = self.checked(mask)
        read = self.memory[torch.where(mask, self.at, 0)]
        return block(torch.where(mask, read, torch.as_tensor(other, dtype=self.dtype)))

    def store(self, x, mask=None):
        mask = self.checked(mask)
        self.memory[self.at[mask]] = torch.broadcast_to(x, self.at.shape)[mask].to(self.dtype)


class Descriptor:
    """Tiles of a tensor as TMA sees them: zeros behind its ends."""

    def __init__(self, host):
        self.tensor, self.block_shape, self.layout = host.base.detach(), list(host.block_shape), host.layout
        self.dtype = host.base.dtype
        n_bytes = torch.Size(self.block_shape).numel() * host.base.element_size()
        self.block_type = types.SimpleNamespace(nbytes=n_bytes)

    def tile(self, coord):
        return self.tensor[tuple(slice(int(c), int(c) + size) for c, size in zip(coord, self.block_shape, strict=True))]


class Shared:
    """A tensor in shared memory, full of nan at first where it can be."""

    def __init__(self, tensor):
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, list(tensor.shape)

    def index(self, i):
        return Shared(self.tensor[int(i)])

    def reshape(self, shape):
        return Shared(self.tensor.view(shape))

    def permute(self, order):
        return Shared(self.tensor.permute(order))

    def store(self, x):
        self.tensor.copy_(x)


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all announced bytes are there."""

    def __init__(self):
        self.changed = threading.Condition()
        self.phase = self.n_bytes = 0

    def init(self, count):
        self.count = self.missing = count

    def arrive(self, count=1):
        self._step(arrived=count)

    def expect(self, n_bytes):
        self._step(arrived=1, n_bytes=n_bytes)

    def complete(self, n_bytes):
        self._step(n_bytes=-n_bytes)

    def _step(self, arrived=0, n_bytes=0):
        with self.changed:
            self.missing -= arrived
            self.n_bytes += n_bytes
            assert self.missing >= 0, "more have arrived than the barrier counts"
            if self.missing == 0 and self.n_bytes == 0:
                self.phase, self.missing = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != phase, timeout=WAIT), "deadlock at a barrier"


class Barriers:
    """One in each slot of a ring."""

    def __init__(self, n):
        self.slots = [Barrier() for _ in range(n)]

    def index(self, i):
        return self.slots[int(i)]


def _allocate(dtype, shape, layout):
    if layout == "barrier":
        return Barrier() if len(shape) == 1 else Barriers(shape[0])
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 12345, dtype=dtype))


def _specialize(functions, *_):
    failures = []

    def run(function, arguments):
        try:
            with torch.no_grad():  # which threads do not inherit
                function(*arguments)
        except BaseException as error:
            failures.append(error)

    partitions = [threading.Thread(target=run, args=job, daemon=True) for job in functions]
    for partition in partitions:
        partition.start()
    for partition in partitions:
        partition.join(2 * WAIT)
    if failures:
        raise failures[0]


def _multiply(a, b, acc, use_acc=True, is_async=False):
    product = block(a.tensor.float() @ b.tensor.float())
    return acc + product if use_acc else product


def _wait_for_products(pending, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def _async_load(descriptor, coord, barrier, shared):
    tile = descriptor.tile(coord)
    shared.tensor.zero_()
    shared.tensor[tuple(slice(size) for size in tile.shape)] = tile
    barrier.complete(descriptor.block_type.nbytes)


def _to_nearest_integer(code, constraints, arguments, **_):
    assert code.startswith("cvt.rni.s32.f32")
    return block(arguments[0].double().round().nan_to_num(0.0).clamp(-(2**31), 2**31 - 1).to(torch.int32))


def _largest(x, axis):
    nothing = torch.iinfo(x.dtype).min if not x.is_floating_point() else -float("inf")
    return torch.where(x != x, block(nothing, x.dtype), x).amax(axis)


PLACE = threading.local()
GL = types.SimpleNamespace(
    **{name: getattr(torch, name) for name in ("float32", "int32", "int64", "exp2", "log2", "reshape")},
    arange=lambda start, end, layout=None: block(torch.arange(start, end)),
    zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
    where=lambda condition, a, b: torch.where(block(condition), block(a), block(b)),
    minimum=lambda a, b: torch.minimum(block(a), block(b)),
    maximum=lambda a, b: torch.maximum(block(a), block(b)),
    max=_largest,
    min=lambda x, axis: x.amin(axis),
    sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
    expand_dims=torch.unsqueeze,
    convert_layout=lambda x, layout: x,
    cdiv=lambda a, b: -(-a // b),
    load=lambda pointer, **options: pointer.load(**options),
    store=lambda pointer, x, mask=None: pointer.store(x, mask),
    program_id=lambda axis: block(PLACE.program[axis]),
    num_programs=lambda axis: PLACE.grid[axis],
    static_range=range,
    static_assert=lambda condition: None,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    inline_asm_elementwise=_to_nearest_integer,
    **dict.fromkeys(("NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "BlockedLayout"), lambda *_: None),
)
NAMES = {
    "gl": GL,
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, n_bytes: barrier.expect(n_bytes),
        wait=lambda barrier, phase: barrier.wait(phase),
        arrive=lambda barrier, count: barrier.arrive(count),
    ),
    "tma": types.SimpleNamespace(store_wait=lambda pending: None),
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": _wait_for_products,
    "fence_async_shared": lambda: None,
    "async_load": _async_load,
    "_reduce_add": lambda descriptor, coord, shared: descriptor.tile(coord).add_(shared.tensor),
}


class Emulated:
    """A kernel, launched as Triton launches it."""

    def __init__(self, kernel):
        self.function = _emulated(kernel, {})
        self.signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid):
        def launch(*args, num_warps, **options):
            arguments = [self._argument(x) for x in self.signature.bind(*args, **options).args]
            PLACE.grid = (*grid, 1)
            for y in range(PLACE.grid[1]):
                for x in range(PLACE.grid[0]):
                    PLACE.program = (x, y)
                    self.function(*arguments)

        return launch

    @staticmethod
    def _argument(x):
        if isinstance(x, torch.Tensor):
            memory = torch.as_strided(x.detach(), (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            return Pointer(memory, block(x.storage_offset()))
        return Descriptor(x) if hasattr(x, "block_shape") else x


def _emulated(kernel, done):
    """The Python function of a kernel, which finds the names above in place of Gluon's."""
    if kernel not in done:
        scope = {}
        done[kernel] = types.FunctionType(kernel.fn.__code__, scope)
        for name, value in kernel.fn.__globals__.items():
            if name in NAMES:
                value = NAMES[name]
            elif hasattr(value, "fn") and hasattr(value, "is_gluon"):
                value = _emulated(value, done)
            elif type(value).__name__ == "constexpr":
                value = value.value
            scope[name] = value
    return done[kernel]


def emulate_hopper(monkeypatch):
    """Let the operators run the Hopper kernels on a CPU until the test ends, and the small ones in the interpreter."""
    from rope_kernels.row_kl import hopper_forward, hopper_relation_backward

    monkeypatch.setattr("rope_kernels.row_kl.custom_op.runs_on_triton", lambda x: True)
    monkeypatch.setattr("rope_kernels.row_kl.custom_op.runs_on_hopper", lambda *_: True)
    for module, name in (
        (hopper_forward, "_row_kl_hopper_fwd_kernel"),
        (hopper_relation_backward, "relation_kl_hopper_bwd_kernel"),
    ):
        monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
    # launches that are kept hold their kernels
    monkeypatch.setattr(hopper_forward, "_launch", hopper_forward._launch.__wrapped__)
    monkeypatch.setattr(hopper_relation_backward, "_plan", hopper_relation_backward._plan.__wrapped__)
