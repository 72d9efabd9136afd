"""Which scores and losses of a model differ from the baseline's beyond noise, cell by cell."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from statistics import fmean, median
from typing import Any, Literal

from .measures.comparisons import baseline_first, runs_of_methods
from .results.json_values import json_values
from .results.paired import CONFIDENCE, MIN_DIFFERENT, mcnemar, over_runs, paired_interval
from .results.result import Pairs, Result

_LISTED = 3  # comparisons that a sentence names


@dataclass(frozen=True)
class Cell:
    """One measure at one length: a model, or the mean of several models of one method, compared with the baseline.

    Args:
        label: the model or method.
        measure: what was measured.
        length: tokens of a prompt, or the end of a span of positions; None for short text.
        name: measure and length or span in words.
        first: mean of the baseline.
        mean: mean of the model.
        low: low end of the 95 % interval of mean - first: by `paired_interval` for scores, by `interval_over_rows` for
            losses, or by `interval_over_blocks` if there is one row; widened by `over_runs` for several models.
        high: high end.
        n: number of pairs.
        unit: what is paired, in the plural.
        p: p of McNemar's exact test; None if scores are not 0 and 1, or of several models.
        different: number of pairs with a difference.
        higher_is_better: False for losses.
        runs: number of trained models whose mean this is.
        sentence: as in `Pairs`.
        note: as in `Pairs`.
    """

    label: str
    measure: str
    length: int | None
    name: str
    first: float
    mean: float
    low: float
    high: float
    n: int
    unit: str
    p: float | None
    different: int
    higher_is_better: bool
    runs: int = 1
    sentence: str = ""
    note: str = ""

    @property
    def difference(self) -> float:
        """`mean` - `first`."""
        return self.mean - self.first

    @property
    def outcome(self) -> Literal["below", "above", "same"]:
        """Whether the model is worse ("below") or better ("above") than the baseline beyond noise.

        The interval must leave out 0. For scores, at least six pairs must differ too, because a bootstrap of fewer is
        overconfident, and McNemar's p, if there is one, must be below 0.05. NaN and infinity, as the loss of a model
        that overflows, are worse than any number.
        """
        if not self.is_finite:
            return "below" if isfinite(self.first) else "above" if isfinite(self.mean) else "same"
        beyond_noise = self.low > 0 or self.high < 0
        if self.higher_is_better:
            significant = self.p is None or self.p < 1 - CONFIDENCE
            beyond_noise = beyond_noise and significant and self.different >= MIN_DIFFERENT
        if not beyond_noise:
            return "same"
        return "above" if (self.difference > 0) == self.higher_is_better else "below"

    @property
    def is_finite(self) -> bool:
        """Whether the means of both models are finite numbers."""
        return isfinite(self.first) and isfinite(self.mean)

    @property
    def effect(self) -> float:
        """How much better the model is: the difference of scores, or minus that of losses in nats."""
        if not self.is_finite:  # NaN cannot be sorted
            return {"below": -inf, "above": inf, "same": 0.0}[self.outcome]
        return self.difference if self.higher_is_better else -self.difference

    def said(self) -> str:
        """The cell in words, with its figures."""
        if not self.is_finite:
            return f"{self.name} ({self.first:.3f} to {self.mean:.3f}, not a finite number)"
        if not self.higher_is_better:
            change = f"{self.first:.3f} to {self.mean:.3f} nats, {self.difference:+.3f}"
            return f"{self.name} ({change}, 95 % interval {self.low:+.3f} to {self.high:+.3f})"
        change = f"{100 * self.first:.0f} to {100 * self.mean:.0f} %, {100 * self.difference:+.0f} points"
        return f"{self.name} ({change}, 95 % interval {100 * self.low:+.0f} to {100 * self.high:+.0f})"

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with None for NaN and infinity."""
        values: dict[str, Any] = json_values({**asdict(self), "difference": self.difference})
        del values["sentence"], values["note"]  # `verdict` has them
        return {**values, "outcome": self.outcome}


@dataclass(frozen=True)
class Regressions:
    """All models compared with the baseline.

    Args:
        baseline: label of the baseline.
        labels: labels of the other models; several models of one method have one.
        cells: all cells that can be compared.
        window: positions up to which a cell lies within the window; None if unknown.
        single: measures with one prompt or sample alone, which cannot be compared.
    """

    baseline: str
    labels: list[str]
    cells: list[Cell]
    window: int | None
    single: tuple[str, ...] = ()

    @property
    def below(self) -> list[Cell]:
        """Cells in which a model is worse beyond noise, model by model, the largest differences first."""
        return self._with("below")

    @property
    def above(self) -> list[Cell]:
        """Cells in which a model is better beyond noise, model by model, the largest differences first."""
        return self._with("above")

    def _with(self, outcome: str) -> list[Cell]:
        cells = [cell for cell in self.cells if cell.outcome == outcome]
        return sorted(cells, key=lambda c: (self.labels.index(c.label), not c.higher_is_better, -abs(c.effect)))

    def statistics(self) -> list[str]:
        """What each model lost and won with intervals and the number of pairs, and the rule, in sentences."""
        if not self.labels:
            return [f"Only {self.baseline} was measured, so there is nothing to compare it with."]
        sentences = [sentence for label in self.labels for sentence in self._about(label)]
        n_cells = len(self.cells)
        if n_cells:
            sentences.append(
                "A comparison counts as lost or won if the 95 % interval of the difference leaves out 0. For scores, "
                f"at least {MIN_DIFFERENT} pairs must differ too, and where answers are right or wrong McNemar's exact "
                "p must be below 0.05. Without any true difference, chance would make up to "
                f"{max(round(n_cells / 40), 1)} of {_counted(n_cells)} lost, and as many won."
            )
        return sentences

    def _about(self, label: str) -> list[str]:
        cells = [cell for cell in self.cells if cell.label == label]
        if not cells:
            return [f"{label} has no figure that can be compared with {self.baseline}, prompt by prompt."]
        below = [c for c in self.below if c.label == label]
        above = [c for c in self.above if c.label == label]
        sentences = [
            f"{label} is worse than {self.baseline} in {len(below)} of {_counted(len(cells))} and better in "
            f"{len(above)}. In {len(cells) - len(below) - len(above)} no difference shows beyond chance."
        ]
        sentences += [f"{label} lost{self._where(below)}: {_listed(below)}."] if below else []
        sentences += [f"{label} won{self._where(above)}: {_listed(above)}."] if above else []
        if cells[0].runs > 1:
            sentences.append(
                f"{label} is the mean of {cells[0].runs} trained models, and its intervals count how much they differ."
            )
        for unit in sorted({c.unit for c in cells}):
            sentences += _unseen([c for c in cells if c.unit == unit and c.is_finite], unit)
        return sentences

    def _where(self, cells: Sequence[Cell]) -> str:
        if self.window is None:
            return ""
        inside = sum(c.length is None or c.length <= self.window for c in cells)
        if inside == len(cells):
            return f", all within the window of {self.window}"
        return f", {inside} of them within the window of {self.window}" if inside else ", all beyond the window"

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with the sentences of `statistics`."""
        return {
            "baseline": self.baseline,
            "window": self.window,
            "statistics": self.statistics(),
            "cells": [cell.to_dict() for cell in self.cells],
        }


def regressions(results: Mapping[str, Mapping[str, Result]], *, window: int | None = None) -> Regressions:
    """Compare each model with the baseline, in each measure and at each length.

    The baseline is the model labelled "native", or else the first. Each measure is compared by the `pairs` of its
    results: answers prompt by prompt, losses row by row. Results without pairs are left out.
    Models whose labels differ only in a number after #, as "ours#1" and "ours#2", are compared as one, by their mean.

    Args:
        results: measure -> label -> result, as `run_suite` returns them.
        window: in positions; None means that of the first result that has one.

    Raises:
        ValueError: two models got different prompts or rows.
    """
    labels: dict[str, None] = {}
    cells: list[Cell] = []
    single: dict[str, None] = {}
    windows = [getattr(result, "window", None) for by_label in results.values() for result in by_label.values()]
    window = window or next(filter(None, windows), None)
    for measure, by_label in results.items():
        ordered = baseline_first(by_label)
        labels |= dict.fromkeys(ordered)
        for method, of_method in runs_of_methods(list(ordered)[1:]).items():
            compared: dict[tuple[Any, ...], list[Pairs]] = {}
            for label in of_method:
                for pairs in ordered[label].pairs(next(iter(ordered.values())), window):
                    if not pairs.same:
                        raise ValueError(
                            f"{label} read other {pairs.unit} of {measure} than the baseline, so they cannot be "
                            "compared."
                        )
                    compared.setdefault((pairs.task, pairs.length, pairs.name), []).append(pairs)
            for runs in compared.values():
                if len(runs[0].first) == 1:  # an interval needs two pairs
                    single[measure] = None
                elif runs[0].first:
                    cells.append(_cell(method, measure, runs))
    order = list(baseline_first(labels))
    methods = list(runs_of_methods(order[1:]))
    return Regressions(order[0] if order else "", methods, cells, window, tuple(single))


def least_difference(cell: Cell) -> float:
    """The smallest difference that would show: half of the interval, and for right and wrong answers six pairs."""
    half = (cell.high - cell.low) / 2
    return half if cell.p is None else max(half, MIN_DIFFERENT / cell.n)


def _unseen(cells: Sequence[Cell], unit: str) -> list[str]:
    """A sentence that says which differences are too small to show, over cells with the same unit."""
    if not cells:
        return []
    n = sorted({c.n for c in cells})
    over = f"Over {n[0] if len(n) == 1 else f'{n[0]} to {n[-1]}'} {unit} a comparison"
    width = median(map(least_difference, cells))
    if not cells[0].higher_is_better:
        # equal losses have an interval of no width
        return [f"{over}, a difference of less than about {width:.2g} nats would not show."] if width else []
    if n[-1] < MIN_DIFFERENT:
        return [f"{over}, no difference counts: at least {MIN_DIFFERENT} must differ."]
    return [f"{over}, a difference of less than about {100 * width:.0f} points would not show."]


def _counted(n: int) -> str:
    return f"{n} comparison{'s' * (n != 1)}"


def _cell(label: str, measure: str, runs: Sequence[Pairs]) -> Cell:
    pairs = runs[0]
    # [n] each: the baseline, and the mean over the models of a method, pair by pair
    first, second = pairs.first, [fmean(scores) for scores in zip(*(run.second for run in runs), strict=True)]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    scores = {*first, *second}
    # losses alone bring an interval of their own
    are_shares = pairs.interval is None and all(0 <= score <= 1 for score in scores)
    if pairs.interval is None:
        low, high = paired_interval(differences, bounds=(-1.0, 1.0) if are_shares else None)
    else:
        low, high = pairs.interval(differences)
    mean = fmean(first)
    if len(runs) > 1:
        low, high = over_runs(low, high, [fmean(run.second) - mean for run in runs])
        low, high = (max(low, -1.0), min(high, 1.0)) if are_shares else (low, high)
    return Cell(
        label,
        f"{measure} {pairs.task}".rstrip(),
        pairs.length,
        pairs.name or (pairs.task or measure) + ("" if pairs.length is None else f" at {pairs.length}"),
        mean,
        mean + fmean(differences) if isfinite(mean) else fmean(second),
        low,
        high,
        len(first),
        pairs.unit,
        mcnemar(first, second) if pairs.interval is None and scores <= {0, 1} and len(runs) == 1 else None,
        sum(d != 0 for d in differences),
        pairs.interval is None,
        len(runs),
        pairs.sentence,
        pairs.note,
    )


def _listed(cells: Sequence[Cell]) -> str:
    """The largest differences of scores, then of losses, and the number of further cells."""
    scores = [cell for cell in cells if cell.higher_is_better][:_LISTED]
    losses = [cell for cell in cells if not cell.higher_is_better][: max(1, _LISTED - len(scores))]
    more = len(cells) - len(scores) - len(losses)
    return "; ".join(cell.said() for cell in [*scores, *losses]) + (f"; and {more} more" if more else "")
