"""Checks of values that a user gives. True is not a number here, nan is never in range, and neither is infinity."""

import math
from typing import Any


def require_number(
    name: str, value: Any, *, least: float | None = None, above: float = 0.0, below: float = math.inf
) -> None:
    """Raise ValueError unless `value` is a finite int or float in range.

    Args:
        name: what the error calls it.
        value: what a user gave.
        least: smallest value; None, if it has to be above `above`.
        above: bound that it must exceed, where there is no `least`.
        below: bound that it must not reach.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (value > above if least is None else value >= least) and value < below:
        return
    allowed = f"above {above:g}" if least is None else f"of at least {least:g}"
    end = f" and below {below:g}" if below < math.inf else ""
    raise ValueError(f"{name} must be a number {allowed}{end}, got {value!r}.")


def require_integer(name: str, value: Any, *, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise ValueError unless `value` is an int in [least, most]."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return
    bounds = [f"at least {least}"] * (least > -math.inf) + [f"at most {most}"] * (most < math.inf)
    allowed = f" of {' and '.join(bounds)}" if bounds else ""
    raise ValueError(f"{name} must be an integer{allowed}, got {value!r}.")


def require_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}.")
