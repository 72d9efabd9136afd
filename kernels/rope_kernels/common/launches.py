"""Launches of Triton kernels that take little Python.

Triton binds the arguments of every launch anew: 25 to 50 microseconds, in which a GPU runs whole kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver


class Launch:
    """A kernel with all of its arguments but the tensors.

    Which code Triton compiles depends on the values of numbers, and of tensors on dtype, device and whether the address
    is a multiple of 16. The first launch whose addresses are goes through Triton, and later ones run the code that it
    found. All others go through Triton each time, and so do all while a hook of Triton's listens, as a profiler's does.

    Args:
        kernel: a jitted function whose parameters are tensors, then numbers, then constants.
        grid: numbers of programs, one or two.
        numbers: values of its numbers.
        **constants: of its constants, by name, and Triton's options.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], **constants: Any) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.numbers = numbers
        self.constants = constants
        self.compiled: Any = None
        self.stream: Callable[[], int]
        self.rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current stream of the current GPU, which always is the one of the tensors.

        Args:
            *tensors: each of the dtype and on the device that it had in other calls; a descriptor of tiles, or None,
                where it was one.
        """
        pointers = []
        bits = 0
        for x in tensors:
            if isinstance(x, torch.Tensor):
                x = x.data_ptr()
                bits |= x
            pointers.append(x)
        kept = self.compiled
        hooked = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
        if kept is not None and not bits % 16 and not hooked:
            # what `kept[grid]` calls, with None for what it makes for hooks
            code = (kept.function, kept.packed_metadata, None, None, None)
            kept.run(*self.grid, self.stream(), *code, *pointers, *self.rest)
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
        # Triton's interpreter compiles nothing
        if not bits % 16 and isinstance(compiled, CompiledKernel):
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self.rest = (*self.numbers, *(self.constants[name] for name in names))
            self.stream = partial(driver.active.get_current_stream, driver.active.get_current_device())
            self.compiled = compiled
