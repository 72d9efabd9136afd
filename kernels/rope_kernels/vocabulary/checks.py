"""Checks of rows, heads and labels for operators of the vocabulary."""

from typing import Any

import torch

from ..common.checks import described, require_tensor

IGNORE_INDEX = -100  # torch's and Transformers' label of a token without a loss


def require_chunk_rows(chunk_rows: Any) -> None:
    """Raise ValueError unless `chunk_rows` is None or an int of at least 1."""
    if chunk_rows is not None and (type(chunk_rows) is not int or chunk_rows < 1):
        raise ValueError(f"chunk_rows must be a whole number, at least 1, or None, got {chunk_rows!r}.")


def require_head(hidden_name: str, hidden: Any, weight_name: str, weight: Any, bias_name: str, bias: Any) -> None:
    """Check rows [N, H], a head [V, H] and a bias [V] or None, all of one dtype and device.

    Raises:
        ValueError: a shape, dtype or device does not fit the others.
    """
    require_tensor(hidden_name, hidden, "[N, H] and floating point")
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(f"{hidden_name} must be [N, H] and floating point, got {described(hidden)}.")
    hidden_size = hidden.shape[1]
    require_tensor(weight_name, weight, "[V, H]")
    if weight.ndim != 2 or weight.shape[1] != hidden_size or not len(weight):
        raise ValueError(
            f"{weight_name} must be [V, H] with H = {hidden_size} as in {hidden_name} and V at least 1, got "
            f"{described(weight)}."
        )
    vocab_size = len(weight)
    if bias is not None:
        require_tensor(bias_name, bias, f"None or [{vocab_size}]")
        if bias.shape != (vocab_size,):
            raise ValueError(
                f"{bias_name} must be None or [V] with V = {vocab_size} as in {weight_name}, got {described(bias)}."
            )
    for name, tensor in ((weight_name, weight), (bias_name, bias)):
        if tensor is not None and (tensor.dtype != hidden.dtype or tensor.device != hidden.device):
            raise ValueError(
                f"{name} must be {hidden.dtype} on {hidden.device} as {hidden_name} is, got {described(tensor)}."
            )


def require_labels(labels: Any, hidden_name: str, hidden: torch.Tensor, vocab_size: int) -> None:
    """Check that labels are [N] int64 in [0, V) or -100, on the device of `hidden` [N, H].

    Raises:
        ValueError: the shape, dtype or device does not fit, or a label is out of range.
    """
    n_rows = len(hidden)
    require_tensor("labels", labels, f"[{n_rows}] int64")
    if labels.shape != (n_rows,) or labels.dtype != torch.int64 or labels.device != hidden.device:
        raise ValueError(
            f"labels must be [{n_rows}] int64 on {hidden.device} as {hidden_name} is, got {described(labels)}."
        )
    # checked here because a label out of range ends the whole CUDA context with a device-side assert
    wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocab_size))]
    if wrong.numel():
        raise ValueError(f"labels must be in [0, {vocab_size}) or {IGNORE_INDEX}, got {wrong[0].item()}.")
