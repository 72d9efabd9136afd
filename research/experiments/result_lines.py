"""Results as JSON lines that several processes may add to, means of them, and slices of a list of runs."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rope_patch.base.environment import device_name, installed_versions

T = TypeVar("T")


def read_lines(*files: Path) -> list[dict[str, Any]]:
    """The results in `files`; one that is not there has none."""
    return [json.loads(line) for f in files if f.is_file() for line in f.read_text(encoding="utf-8").splitlines()]


def add_line(file: Path, result: dict[str, Any]) -> None:
    """Add one result, in a single write: lines of processes side by side do not mix."""
    with file.open("ab", buffering=0) as out:
        out.write((json.dumps(result) + "\n").encode())


def versions() -> dict[str, Any]:
    """What a result was made with."""
    return {
        "gpu": device_name(torch.cuda.is_available()),
        "versions": installed_versions("torch", "triton", "transformers", "trl"),
    }


def share(runs: Sequence[T], part: str) -> list[T]:
    """Every N-th of `runs`, from the K-th, of part K/N.

    Raises:
        ValueError: not two integers with 0 <= K < N.
    """
    number, _, total = part.partition("/")
    if not (number.isdecimal() and total.isdecimal() and int(number) < int(total)):
        raise ValueError(f"--part must be K/N with 0 <= K < N, got {part!r}.")
    return list(runs[int(number) :: int(total)])


def runs_by_arm(runs: Sequence[dict[str, Any]], name: str = "arm") -> dict[str, list[dict[str, Any]]]:
    """Runs of each arm, in their order; `name` is the field that has it."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        arms.setdefault(run[name], []).append(run)
    return arms


def runs_by_seed(runs: Sequence[dict[str, Any]], name: str = "arm") -> dict[str, dict[int, dict[str, Any]]]:
    """Runs of each arm by their seed; of several of one seed the last."""
    return {arm: {run["seed"]: run for run in same} for arm, same in runs_by_arm(runs, name).items()}


def mean_of(bins: list[dict[str, float]], first: int, end: int) -> float:
    """Mean loss of the positions from first to end, of bins that lie within."""
    inside = [b for b in bins if first <= b["first"] and b["end"] <= end]
    return sum(b["loss"] * (b["end"] - b["first"]) for b in inside) / sum(b["end"] - b["first"] for b in inside)


def spread(values: list[float], digits: int) -> str:
    """The mean, with half of the distance between smallest and largest."""
    shown = f"{statistics.mean(values):.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ± {(max(values) - min(values)) / 2:.{digits}f}"


def held(holds: Sequence[bool]) -> str:
    """In how many seeds something is so."""
    return f"{sum(holds)} of {len(holds)} seeds" if holds else "not run"


def orderings(
    claims: Sequence[tuple[str, str, str, str]],
    runs: Sequence[dict[str, Any]],
    value: Callable[[dict[str, Any], str], float | None],
) -> list[str]:
    """Rows of a markdown table: in how many seeds a paper's orderings hold.

    Args:
        claims: metric, the arm that is lower, the arm that is higher, and the paper's figures.
        runs: with "arm" and "seed".
        value: of a run's metric, None where it has none.
    """
    lines = ["| the paper's ordering | its figures | holds in |", "|---|---|---|"]
    by_arm = runs_by_seed(runs)
    for metric, lower, higher, paper in claims:
        low, high = by_arm.get(lower, {}), by_arm.get(higher, {})
        pairs = [(value(low[seed], metric), value(high[seed], metric)) for seed in sorted(low.keys() & high.keys())]
        outcome = held([a < b for a, b in pairs if a is not None and b is not None])
        lines.append(f"| {metric}: {lower} < {higher} | {paper} | {outcome} |")
    return lines


class Deadline:
    """The end of a slice of time, counted from when this is made.

    Args:
        minutes: None for none.
    """

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    def leaves(self, seconds: float) -> bool:
        """Whether that many seconds are left."""
        return self.end is None or time.monotonic() + seconds < self.end
