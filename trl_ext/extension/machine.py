"""The device of an extension: its memory and its speed."""

from dataclasses import dataclass

import psutil
import torch
from torch.utils.benchmark import Timer

from rope_kernels.common.gpu_memory import free_gpu_bytes
from rope_patch.base.environment import device_name

from ..memory.plan import GIB
from .duration import H200, Rate

_SIZE = {"cuda": 4096, "cpu": 1024}  # rows and columns of the matrices that are multiplied
_FREE = 0.9  # of free memory that a step may take
_SECONDS = 0.2  # about as long as the calibration takes


@dataclass(frozen=True)
class Machine:
    """A device.

    Args:
        device: "cpu" or "cuda".
        name: of the GPU or the processor.
        memory: bytes that are free on it.
        bf16: whether products in bfloat16 are fast there.
        n_gpus: GPUs that train.
        rate: its speed; None is timed on this machine.
    """

    device: str
    name: str
    memory: int
    bf16: bool
    n_gpus: int = 1
    rate: Rate | None = None

    @classmethod
    def of(cls, device: str) -> "Machine":
        """The device that `device` names, with the memory that is free now."""
        if device == "cuda":
            n_gpus = torch.cuda.device_count()
            name = f"one of {n_gpus} {device_name(True)}" if n_gpus > 1 else device_name(True)
            return cls(device, name, free_gpu_bytes(), torch.cuda.is_bf16_supported())
        threads = torch.get_num_threads()
        return cls(device, f"{threads} thread{'s' * (threads > 1)} of a CPU", psutil.virtual_memory().available, False)

    @classmethod
    def elsewhere(cls, gib: float, n_gpus: int = 1) -> "Machine":
        """GPUs of `gib` GiB each that are not here, as fast as an H200."""
        return cls("cuda", "a GPU that is not here", int(gib * GIB), True, n_gpus, H200)

    @property
    def room(self) -> int:
        """Bytes that a step may take, on one GPU."""
        return int(_FREE * self.memory)

    def calibrate(self, precision: str) -> Rate:
        """How fast a product of two large matrices and of two tiny ones is, measured for half a second."""
        if self.rate is not None:
            return self.rate
        n = _SIZE[self.device]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        left = torch.randn(n, n, device=self.device, dtype=dtype)
        large, small = _seconds(left), _seconds(left[:8, :8].contiguous())
        return Rate(2 * n**3 / large, small)


def _seconds(matrix: torch.Tensor) -> float:
    """Seconds of a product of `matrix` with itself, after some that do not count."""
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=_SECONDS).median)
