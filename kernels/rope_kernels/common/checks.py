"""Errors of public operators: the argument, what is allowed, and what was given."""

import numbers
from typing import Any

import torch


def described(x: Any) -> str:
    """Shape, dtype and device of a tensor, anything else as Python writes it, its type where that is long."""
    if isinstance(x, torch.Tensor):
        return f"{list(x.shape)} {x.dtype} on {x.device}"
    written = repr(x)
    return written if len(written) <= 80 else f"a {type(x).__name__}"


def require_tensor(name: str, x: Any, allowed: str) -> None:
    """Raise ValueError unless `x` is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be {allowed}, a tensor, got {described(x)}.")


def require_positive(name: str, value: Any, instead: str = "", bounded: bool = True) -> float:
    """`value` as a float, if it is a number above 0, no bool and, if `bounded`, finite.

    Args:
        name: of the argument.
        value: of the argument.
        instead: what else is allowed, for the message.
        bounded: whether infinity is refused.

    Raises:
        ValueError: it is not.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and value > 0 and (not bounded or value < float("inf")):
        return float(value)
    raise ValueError(f"{name} must be above 0{' and finite' if bounded else ''}{instead}, got {value!r}.")
