"""Where Triton kernels run."""

import torch


def runs_on_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels run on `x`: on a GPU, except for float64, which tensor cores do not speak here."""
    return x.is_cuda and x.dtype != torch.float64
