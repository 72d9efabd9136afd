"""What a model lost and won beside another one, cell by cell, beyond noise."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from statistics import fmean, median
from typing import Any, Literal

from .measures.comparisons import baseline_first
from .measures.loss_by_position import ONE_ROW
from .results.json_values import json_values
from .results.paired import CONFIDENCE, MIN_DIFFERENT, mcnemar, mean_difference, paired_interval
from .results.result import Pairs, Result

_TOLD = 3  # scores that the verdict names of those lost or won


@dataclass(frozen=True)
class Cell:
    """One measure at one length, of a model and of the one that it is compared with.

    Args:
        label: the model.
        measure: what was measured.
        length: tokens of a prompt, or the end of a span of positions; None for short text.
        name: measure and length or span in words.
        first: mean of the model that this one is compared with.
        mean: of this model.
        low: end of the 95 % interval of mean - first: of scores `paired_interval`, of losses `interval_over_rows`, or
            `interval_over_blocks` where there is one row.
        high: the other end.
        n: pairs.
        unit: what a pair is, in the plural.
        p: of McNemar's exact test; None where scores are not 0 and 1.
        different: pairs in which the two differ.
        higher_is_better: False for losses.
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

    @property
    def difference(self) -> float:
        """How much more than the other model's mean this one's is."""
        return self.mean - self.first

    @property
    def outcome(self) -> Literal["below", "above", "same"]:
        """Whether the model is worse or better than the other one beyond noise.

        That is: the interval does not hold 0. Of scores, at least six pairs differ too, since a bootstrap of a few
        pairs that differ is too sure of itself, and McNemar's p, if there is one, is below 0.05. Intervals of losses
        are wide by themselves where there are few rows. A figure that is no number, as the loss of a model that
        computes NaN, is worse than any that is one.
        """
        if not self.is_finite:
            return "below" if isfinite(self.first) else "above" if isfinite(self.mean) else "same"
        beyond = self.low > 0 or self.high < 0
        if self.higher_is_better and self.different < MIN_DIFFERENT:
            beyond = False
        if not beyond or (self.p is not None and self.p >= 1 - CONFIDENCE):
            return "same"
        return "above" if (self.difference > 0) == self.higher_is_better else "below"

    @property
    def is_of_one_text(self) -> bool:
        """Whether it is a loss on one row: what is won or lost in it may be another in other texts."""
        return self.unit == ONE_ROW

    @property
    def is_finite(self) -> bool:
        """Whether the figures of both models are numbers."""
        return isfinite(self.first) and isfinite(self.mean)

    @property
    def effect(self) -> float:
        """How much better the model is: its difference, in points of 100 or in nats, with a sign that means better."""
        if not self.is_finite:  # NaN has no place in an order
            return {"below": -inf, "above": inf, "same": 0.0}[self.outcome]
        return self.difference if self.higher_is_better else -self.difference

    def said(self) -> str:
        """In words, with figures."""
        if not self.is_finite:
            return f"{self.name} ({self.first:.3f} to {self.mean:.3f}, which is no number)"
        if not self.higher_is_better:
            change = f"{self.first:.3f} to {self.mean:.3f} nats, {self.difference:+.3f}"
            return f"{self.name} ({change}, 95 % from {self.low:+.3f} to {self.high:+.3f})"
        change = f"{100 * self.first:.0f} to {100 * self.mean:.0f} %, {100 * self.difference:+.0f} points"
        return f"{self.name} ({change}, 95 % from {100 * self.low:+.0f} to {100 * self.high:+.0f})"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a number that is NaN or infinite is None."""
        values: dict[str, Any] = json_values({**asdict(self), "difference": self.difference})
        return {**values, "outcome": self.outcome}


@dataclass(frozen=True)
class Regressions:
    """All models beside the one that they are compared with.

    Args:
        baseline: label of that one.
        labels: of the others.
        cells: of all of them that could be compared.
        window: positions within which a cell counts as inside; None where it is not known.
    """

    baseline: str
    labels: list[str]
    cells: list[Cell]
    window: int | None

    @property
    def below(self) -> list[Cell]:
        """Cells in which a model is worse beyond noise, model by model, the largest losses first."""
        return self._with("below")

    @property
    def above(self) -> list[Cell]:
        """Cells in which a model is better beyond noise, model by model, the largest gains first."""
        return self._with("above")

    def _with(self, outcome: str) -> list[Cell]:
        cells = [cell for cell in self.cells if cell.outcome == outcome]
        return sorted(cells, key=lambda c: (self.labels.index(c.label), not c.higher_is_better, -abs(c.effect)))

    def verdict(self) -> list[str]:
        """What was won, what was lost, by how much and over how many pairs, in sentences."""
        if not self.labels:
            return [f"Only {self.baseline} was measured, so there is nothing to compare it with."]
        said = [sentence for label in self.labels for sentence in self._about(label)]
        n_cells = len(self.cells)
        if n_cells:
            by_chance = max(round(n_cells / 40), 1)
            said.append(
                "A cell counts as lost or won if the 95 % interval of the difference leaves out 0. Of scores, at least "
                f"{MIN_DIFFERENT} pairs must differ too, and McNemar's exact p is below 0.05 where answers are right "
                f"or wrong. Of {_counted(n_cells, 'cell')} without any true difference, up to {by_chance} would be "
                "called lost by chance, and as many won."
            )
        return said

    def _about(self, label: str) -> list[str]:
        cells = [cell for cell in self.cells if cell.label == label]
        if not cells:
            return [f"{label} has no cell that can be compared with {self.baseline}, prompt by prompt."]
        below = [c for c in self.below if c.label == label]
        above = [c for c in self.above if c.label == label]
        said = [
            f"{label} is worse than {self.baseline} in {len(below)} of {_counted(len(cells), 'cell')}, better in "
            f"{len(above)}, and in {len(cells) - len(below) - len(above)} no difference shows beyond noise."
        ]
        said += [f"{label} lost{self._where(below)}: {_listed(below)}."] if below else []
        said += [f"{label} won{self._where(above)}: {_listed(above)}."] if above else []
        for unit in sorted({c.unit for c in cells}):
            said += _unseen([c for c in cells if c.unit == unit and c.is_finite], unit)
        if any(c.is_of_one_text for c in cells):
            said.append(
                "Losses were read from one row, which is one text: what is won or lost in them is so for this text "
                "alone, and only several rows show how much texts differ."
            )
        return said

    def _where(self, cells: Sequence[Cell]) -> str:
        if self.window is None:
            return ""
        inside = sum(c.length is None or c.length <= self.window for c in cells)
        if inside == len(cells):
            return f", all within the window of {self.window}"
        return f", {inside} of them within the window of {self.window}" if inside else ", all beyond the window"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with the verdict."""
        return {
            "baseline": self.baseline,
            "window": self.window,
            "verdict": self.verdict(),
            "cells": [cell.to_dict() for cell in self.cells],
        }


def regressions(results: Mapping[str, Mapping[str, Result]], *, window: int | None = None) -> Regressions:
    """Compare each model with the one named "native", or else the first, in each measure and at each length.

    Results are compared by their `pairs`: retrieval, RULER, short text and lm-eval's tasks prompt by prompt, losses row
    by row. Where losses are of one row, the verdict says that it is of this text alone. Other measures are left out,
    and so are results that keep no scores of single prompts.

    Args:
        results: measure -> label -> result, as `run_suite` returns it.
        window: positions; None means that of the first result that knows one.

    Raises:
        ValueError: two models were asked different prompts or read different rows.
    """
    labels: list[str] = []
    cells: list[Cell] = []
    windows = [getattr(result, "window", None) for by_label in results.values() for result in by_label.values()]
    window = window or next(filter(None, windows), None)
    for measure, by_label in results.items():
        ordered = baseline_first(by_label)
        labels += [label for label in ordered if label not in labels]
        for label, result in list(ordered.items())[1:]:
            for pairs in result.pairs(next(iter(ordered.values())), window):
                if not pairs.same:
                    raise ValueError(f"{label} was given other {pairs.unit} of {measure}: nothing can be paired.")
                if len(pairs.first) > 1:  # one pair says nothing
                    cells.append(_cell(label, measure, pairs))
    order = list(baseline_first(dict.fromkeys(labels)))
    return Regressions(order[0] if order else "", order[1:], cells, window)


def _unseen(cells: Sequence[Cell], unit: str) -> list[str]:
    """How large a difference would have had to be, over cells of one unit."""
    if not cells:
        return []
    n = sorted({c.n for c in cells})
    over = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
    width = median(least_difference(c) for c in cells)
    if not cells[0].higher_is_better:  # equal models have no width, which says nothing of others
        said = f"Over {over} {unit} a cell, a difference of less than about {width:.2g} nats would not show."
        return [said] if width else []
    if n[-1] < MIN_DIFFERENT:
        return [f"Over {over} {unit} a cell, no difference counts: {MIN_DIFFERENT} must differ at least."]
    return [f"Over {over} {unit} a cell, a difference of less than about {100 * width:.0f} points would not show."]


def least_difference(cell: Cell) -> float:
    """A difference that would just show: half of the interval, and of rights and wrongs the least number of pairs."""
    half = (cell.high - cell.low) / 2
    return half if cell.p is None else max(half, MIN_DIFFERENT / cell.n)


def _counted(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"


def _cell(label: str, measure: str, pairs: Pairs) -> Cell:
    first, second = pairs.first, pairs.second
    differences = [b - a for a, b in zip(first, second, strict=True)]
    right_or_wrong = pairs.interval is None and {*first, *second} <= {0, 1}
    if pairs.interval is None:
        are_shares = all(0 <= score <= 1 for score in (*first, *second))
        low, high = paired_interval(differences, bounds=(-1.0, 1.0) if are_shares else None)
    else:
        low, high = pairs.interval(differences)
    mean = fmean(first)
    return Cell(
        label,
        f"{measure} {pairs.task}".rstrip(),
        pairs.length,
        pairs.name or (pairs.task or measure) + ("" if pairs.length is None else f" at {pairs.length}"),
        mean,
        mean + mean_difference(first, second) if isfinite(mean) else fmean(second),
        low,
        high,
        len(first),
        pairs.unit,
        mcnemar(first, second) if right_or_wrong else None,
        sum(d != 0 for d in differences),
        pairs.interval is None,
    )


def _listed(cells: Sequence[Cell]) -> str:
    """The largest differences of scores and the largest of losses, and how many more there are."""
    scores = [cell for cell in cells if cell.higher_is_better][:_TOLD]
    losses = [cell for cell in cells if not cell.higher_is_better][: max(1, _TOLD - len(scores))]
    more = len(cells) - len(scores) - len(losses)
    return "; ".join(cell.said() for cell in [*scores, *losses]) + (f"; and {more} more" if more else "")
