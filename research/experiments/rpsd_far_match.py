"""Strengths of noise and dropout at which research/experiments/rpsd_far.py's controls are as strong as the skip."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rpsd_far_arms import Arm, arms

TRIED = {"noise": (0.5, 1.0, 2.0), "dropout": (0.005, 0.01, 0.02)}
ROWS = 8  # for each: the same noise everywhere in a row, so that few do


def matched(kl: Callable[[Arm, int], float], row: int, n_rows: int) -> dict[str, Any]:
    """The strength of each control whose KL is the skip's.

    Args:
        kl: of an arm's predictions before it is trained, mean over the first so many rows, nats.
        row: tokens of a row.
        n_rows: rows of the skip's KL, which one place a row is drawn for.

    Returns:
        "kl" of the skip, "tried" pairs of strength and KL of each control, and the "strengths", between those tried or
        on the line through the two nearest.
    """
    target = kl(arms(row)["skip"], n_rows)
    tried = {
        name: [(strength, kl(arms(row, **{name: strength})[name], ROWS)) for strength in strengths]
        for name, strengths in TRIED.items()
    }
    return {"kl": target, "tried": tried, "strengths": {name: at(target, pairs) for name, pairs in tried.items()}}


def at(target: float, pairs: Sequence[tuple[float, float]]) -> float:
    """The strength that has a KL, where the logarithm of one is piecewise linear in that of the other.

    Args:
        target: KL in nats.
        pairs: strengths and their KL, both rising.
    """
    points = [(math.log(strength), math.log(kl)) for strength, kl in pairs]
    k = next((k for k in range(1, len(points) - 1) if points[k][1] >= math.log(target)), len(points) - 1)
    (x0, y0), (x1, y1) = points[k - 1 : k + 1]
    return math.exp(x0 + (x1 - x0) * (math.log(target) - y0) / (y1 - y0))


def mean_kl(log: Sequence[dict[str, float]]) -> float:
    """Of all steps of a training, each entry of whose log is the mean since the one before."""
    ends = pairwise([0.0, *(entry["step"] for entry in log)])
    return fmean([entry["kl"] for entry in log], [end - begin for begin, end in ends])
