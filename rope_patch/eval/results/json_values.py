"""Figures that are no numbers, in JSON, which has no NaN and no infinity."""

import math
from types import NoneType
from typing import Any, get_args


def json_values(value: Any) -> Any:
    """The same lists and dictionaries with None, JSON's null, in place of floats that are NaN or infinite.

    Strict parsers refuse the `NaN` that Python writes.
    """
    if isinstance(value, dict):
        return {key: json_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(value: Any) -> Any:
    """The same lists and dictionaries with NaN in place of None: what `json_values` made, where all are numbers."""
    if isinstance(value, dict):
        return {key: with_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_nan(one) for one in value]
    return math.nan if value is None else value


def is_of_floats(hint: Any) -> bool:
    """Whether a type is float, or lists or dictionaries of floats, none of which may be None."""
    parts = get_args(hint)
    return hint is float or (NoneType not in parts and any(is_of_floats(part) for part in parts))
