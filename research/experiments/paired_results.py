"""Differences between runs on the same prompts, with intervals."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rope_patch.eval.results.paired import paired_interval

Line = dict[str, Any]
Scores = Callable[[Line], list[float]]
SHARES = (-1.0, 1.0)  # between which differences of shares are


def over_seeds(of_seeds: Sequence[Sequence[float]]) -> list[float]:
    """Of each prompt the mean over seeds."""
    return [fmean(values) for values in zip(*of_seeds, strict=True)]


def in_brackets(differences: Sequence[float], bounds: tuple[float, float] | None = SHARES, digits: int = 3) -> str:
    """The 95 % interval of the mean of differences, within bounds that each of them has."""
    low, high = paired_interval(differences, bounds=bounds)
    return f"({low:+.{digits}f} to {high:+.{digits}f})"


def seed_pairs(runs: Sequence[Line], references: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Runs with the reference of their seed."""
    by_seed = {run["seed"]: run for run in references}
    return [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]


def difference(pairs: Sequence[tuple[Line, Line]], scores: Scores, digits: int = 3) -> str:
    """How much more the first runs of pairs have than the second ones, with the paired 95 % interval, or a dash.

    Each prompt counts by the mean over pairs of its difference, and the bootstrap is over prompts. Where not all pairs
    were measured, it says of how many seeds it is.

    Args:
        pairs: of one seed each, or with one reference for all.
        scores: of a run, one a prompt; none where it was not measured.
        digits: that are shown.
    """
    both = [(scores(run), scores(reference)) for run, reference in pairs]
    both = [(ours, theirs) for ours, theirs in both if ours and theirs]
    if not both:
        return "-"
    per_prompt = over_seeds([[a - b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in both])
    within = all(-1 <= d <= 1 for d in per_prompt)  # of shares; weighed ones may be more
    fewer = f" of {len(both)} seed{'s' if len(both) > 1 else ''}" if len(both) < len(pairs) else ""
    return f"{fmean(per_prompt):+.{digits}f} {in_brackets(per_prompt, SHARES if within else None, digits)}{fewer}"


def macro(by_name: dict[str, list[float]], *without: str) -> list[float]:
    """Scores of all samples, weighed so that their mean is that of the benchmarks' means."""
    kept = {name: scores for name, scores in sorted(by_name.items()) if name not in without and scores}
    total = sum(map(len, kept.values()))
    return [score * total / (len(kept) * len(scores)) for scores in kept.values() for score in scores]


def cell_scores(run: Line, test: str, length: int) -> list[float]:
    """Of the prompts of one test and length that a model answered as it writes."""
    cells = [c for c in run.get("asked", []) if (c["test"], c["length"]) == (test, length)]
    return [float(score) for c in cells for score in c["scores"]]


def cells_of(runs: Sequence[Line]) -> list[tuple[str, int]]:
    """(test, length) of all prompts that were answered."""
    return list(dict.fromkeys((c["test"], c["length"]) for run in runs for c in run.get("asked", [])))


def written_names(cells: Sequence[tuple[str, int]]) -> list[str]:
    """Names of what `written` gives."""
    by_eighths = [f"keys {n} by distance, nearest eighth first" for test, n in cells if test == "keys"]
    return [*(f"{test} {n}" for test, n in cells), *by_eighths]


def written(runs: Sequence[Line], cells: Sequence[tuple[str, int]], keys: int) -> list[str]:
    """Shares of right answers as written of each test and length, then of keyed numbers by distance.

    They are over those runs that were asked; a dash where none was.
    """

    def mean(test: str, length: int) -> str:
        scores = [score for run in runs for score in cell_scores(run, test, length)]
        return f"{fmean(scores):.2f}" if scores else "-"

    distances = [by_distance(runs, n, keys) for test, n in cells if test == "keys"]
    return [*(mean(*cell) for cell in cells), *distances]


def by_distance(runs: Sequence[Line], length: int, keys: int) -> str:
    """Shares of right answers about keyed numbers, those of the sentence nearest to the question first."""
    scores = [scores for run in runs if (scores := cell_scores(run, "keys", length))]
    if not scores:
        return "-"
    return " / ".join(f"{fmean(s for of_run in scores for s in of_run[k::keys]):.2f}" for k in reversed(range(keys)))


def row(cells: Sequence[str]) -> str:
    """A row of a markdown table."""
    return f"| {' | '.join(cells)} |"


def head(names: Sequence[str]) -> list[str]:
    """The first two rows of a markdown table."""
    return [row(names), "|---" * len(names) + "|"]
