"""Remove rows that accelerate repeats to fill the last batches of an evaluation on several ranks."""

from typing import Any

import torch
from accelerate.state import GradientState


def without_repeated(
    inputs: dict[str, Any], state: GradientState, batch_size: int, reader: int
) -> tuple[dict[str, Any], bool]:
    """An evaluation batch without repeated rows.

    A batch of repeated rows only keeps its rows, as all ranks must run a forward, and loses its labels.

    Args:
        inputs: the batch.
        state: of the accelerator; it knows the last batches of a set, and how many of their rows are not repeated.
        batch_size: rows of a full batch.
        reader: which of the last batches this is, from 0.

    Returns:
        The batch, and whether all of its rows repeat others.
    """
    rows = len(inputs["input_ids"])
    # a smaller batch is the last one of a set that one process reads, which repeats nothing
    if not state.end_of_dataloader or state.remainder <= 0 or rows != batch_size:
        return inputs, False
    kept = min(max(state.remainder - reader * batch_size, 0), batch_size)  # readers get full batches in turn
    if kept == 0:
        return {**inputs, "labels": torch.full_like(inputs["labels"], -100)}, True
    tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.ndim and len(v) == rows}
    return {**inputs, **{name: value[:kept] for name, value in tensors.items()}}, False
