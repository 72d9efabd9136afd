"""GPU memory that a process may still allocate."""

import torch


def free_gpu_bytes(device: torch.device | None = None) -> int:
    """min(free, share * total - reserved), in bytes.

    free is what no process holds, reserved what PyTorch holds for this process, and share the fraction that
    `torch.cuda.set_per_process_memory_fraction` has set, by default 1. So processes that share a GPU can each plan with
    their part.

    Args:
        device: a GPU; None, or one without an index, is the current one.
    """
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    share = torch.cuda.get_per_process_memory_fraction(index)
    return max(min(free, int(share * total) - torch.cuda.memory_reserved(index)), 0)
