"""Learning rates of a comparison: every arm at several with one seed, then seeds at the rate that was best for it.

A line of results has "rate", and "choice", by which its study chooses, less being better. What is behind "choice" is
measured on texts that nothing else is reported of.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import Line, has
from result_lines import read_lines


def add_rate_arguments(parser: argparse.ArgumentParser, choice: str) -> None:
    """--rates and --best."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--rates", type=float, nargs="+", metavar="RATE", help="train every arm at each of these")
    what = f"train every arm at the rate of these files that has the least {choice}"
    group.add_argument("--best", type=Path, nargs="+", metavar="FILE", help=what)


def rates_of(
    args: argparse.Namespace, of: Mapping[str, Any], otherwise: float | None, field: str = "rate"
) -> list[float | None]:
    """The rates that an arm is trained at.

    Args:
        args: with --rates and --best.
        of: fields of the arm's lines in the files of --best.
        otherwise: its rate without both.
        field: of a line, which has its rate.
    """
    if args.best:
        return [best_rate(read_lines(*args.best), of, field)]
    return args.rates or [otherwise]


def choices(lines: Sequence[Line], of: Mapping[str, Any], field: str = "rate") -> dict[float, float]:
    """The mean "choice" over seeds at each rate of the lines with these fields."""
    by_rate: dict[float, list[float]] = {}
    for line in lines:
        if line.get(field) is not None and line.get("choice") is not None and has(line, of):
            by_rate.setdefault(line[field], []).append(line["choice"])
    return {rate: fmean(values) for rate, values in sorted(by_rate.items())}


def best_rate(lines: Sequence[Line], of: Mapping[str, Any], field: str = "rate") -> float:
    """The rate with the least mean "choice" of the lines with these fields.

    Raises:
        ValueError: there are none.
    """
    by_rate = choices(lines, of, field)
    if not by_rate:
        raise ValueError(f"the files of --best have no line with a rate and {dict(of)}: run --rates first.")
    best = min(by_rate, key=by_rate.__getitem__)
    if best in (min(by_rate), max(by_rate)) and len(by_rate) > 1:
        print(f"{dict(of)}: the best rate, {best:g}, is at the end of those that were tried", flush=True)
    return best
