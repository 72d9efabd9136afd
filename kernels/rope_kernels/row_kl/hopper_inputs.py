"""Which inputs the Hopper kernels take. It imports no Gluon, which Triton before 3.6 has in another form."""

from functools import cache, lru_cache

import torch

from .visibility import Visibility

_TRITON = (3, 6)  # the first whose warp_specialize takes functions with their arguments
# integer sums of the heads of a launch, bytes: they stay within the L2 cache
_SUMS_BYTES = 32 * 2**20


def runs_on_hopper(tensors: list[torch.Tensor], visibility: Visibility) -> bool:
    """Whether Hopper's kernels take the inputs: its GPU, 16 bits, head_dim up to 128, causal, aligned."""
    x = tensors[0]
    return (
        x.is_cuda
        and _has_kernels(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[-1] <= 128
        and visibility.causal
        and all(_fits_tma(y) for y in tensors)
    )


def heads_of_a_launch(heads: int, sums_bytes: int) -> int:
    """How many of `heads` a launch of the backward takes, from the bytes of integer sums that each needs.

    Sums of several heads take `_SUMS_BYTES` at most. One head takes what it takes, 4 bytes for each of the 64 or 128
    features of a token: at a head_dim above 64 it is more from 64K tokens on, 64 MiB at 128K, and else half as much.
    """
    launches = -(-heads // max(1, _SUMS_BYTES // sums_bytes))
    return -(-heads // launches)


@cache
def _has_kernels(device: torch.device) -> bool:
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == 9 and version >= _TRITON


def _fits_tma(x: torch.Tensor) -> bool:
    """16-byte alignment of the start and of every stride that is walked."""
    return x.data_ptr() % 16 == 0 and _steps_fit_tma(x.shape, x.stride())


@lru_cache(maxsize=1024)
def _steps_fit_tma(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    steps = [stride for stride, size in zip(strides[:3], shape[:3], strict=True) if size > 1]
    return all(step % 8 == 0 and step > 0 for step in steps)
