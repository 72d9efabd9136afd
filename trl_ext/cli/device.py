"""Where a command runs. Imports nothing heavy."""


def choose_device(requested: str | None, has_gpu: bool) -> str:
    """What was asked for with --device, "cpu" or "cuda", else a GPU where there is one.

    Raises:
        ValueError: a GPU was asked for and there is none.
    """
    if requested == "cuda" and not has_gpu:
        raise ValueError("--device cuda needs a GPU that torch can see; there is none. Use --device cpu.")
    return requested or ("cuda" if has_gpu else "cpu")
