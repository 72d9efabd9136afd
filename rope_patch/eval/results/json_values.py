"""NaN and infinity as JSON's null, and back."""

import math
from types import NoneType
from typing import Any, get_args


def json_values(value: Any) -> Any:
    """Replace NaN and infinite floats by None, in nested lists and dictionaries.

    JSON has neither, and strict parsers refuse the `NaN` that Python's json module writes.
    """
    if isinstance(value, dict):
        return {key: json_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(value: Any) -> Any:
    """Replace None by NaN: the inverse of `json_values` for values that are all numbers."""
    if isinstance(value, dict):
        return {key: with_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_nan(one) for one in value]
    return math.nan if value is None else value


def holds_floats(hint: Any) -> bool:
    """Whether a type is float, or nested lists or dictionaries of floats without `None`."""
    parts = get_args(hint)
    return hint is float or (NoneType not in parts and any(holds_floats(part) for part in parts))
