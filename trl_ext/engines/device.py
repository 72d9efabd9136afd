"""Where a command runs. Imports nothing heavy."""

import gc
import os


def free_memory() -> None:
    """Let go of models, which are cycles with their hooks."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def choose_device(requested: str | None, has_gpu: bool) -> str:
    """The device of --device, "cpu" or "cuda"; without it, a GPU where there is one.

    Raises:
        ValueError: --device cuda, and there is no GPU.
    """
    if requested == "cuda" and not has_gpu:
        raise ValueError("--device cuda needs a GPU that torch can see; there is none. Use --device cpu.")
    return requested or ("cuda" if has_gpu else "cpu")


def require_one_process(what: str) -> None:
    """Raise where a launcher has started several processes, which would all write the same files.

    Args:
        what: the command, in words of an error.
    """
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if n > 1 and "LOCAL_RANK" in os.environ:  # launchers set both; a cluster's job may have WORLD_SIZE alone
        raise ValueError(
            f"{what} runs in one process, and a launcher has started {n}: leave out accelerate launch, or torchrun. "
            "`rope-patch train` and `rope-patch extend` start several with --accelerate-config NAME."
        )
