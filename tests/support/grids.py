"""Grids of test cases that are fast where every two values meet, and slow elsewhere."""

from collections.abc import Sequence
from typing import Any

import pytest


def met_in_pairs(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[Any]:
    """The cases of a grid, for `pytest.mark.parametrize`: a Latin square of them is fast, the others are slow.

    Case (i, j, k) is fast where k = (i + j) mod the length of `third`, which must not be longer than the others: each
    two values of different axes then meet in a fast case.
    """
    assert len(third) <= min(len(first), len(second))
    return [
        pytest.param(one, other, last, marks=() if k == (i + j) % len(third) else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
        for k, last in enumerate(third)
    ]
