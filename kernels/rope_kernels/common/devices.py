"""Where Triton kernels run."""

import torch


def runs_on_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels run on `x`: on a GPU, but not for float64, which the kernels do not multiply."""
    return x.is_cuda and x.dtype != torch.float64
