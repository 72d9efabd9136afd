"""What each model won and lost against the baseline, and its figures, in words: the opening of a report."""

from collections.abc import Mapping, Sequence
from math import exp, isfinite
from statistics import fmean

from .measures.comparisons import runs_of_methods
from .regressions import Cell, Regressions, least_difference
from .results.paired import MIN_DIFFERENT
from .results.result import Result
from .suite import MEASURES

_LISTED = 8  # sentences after "Won" and after "Lost"; the page lists all comparisons at its end


def verdict(compared: Regressions) -> list[str]:
    """What each model won and lost beyond chance, in sentences."""
    sentences = []
    for label, by_outcome in changes(compared).items():
        for outcome, said in by_outcome.items():
            begin = f"{outcome + ':':6}" if len(compared.labels) == 1 else f"{label} {outcome.lower()}: "
            sentences += [begin + sentence for sentence in said]
    return sentences + notes(compared)


def changes(compared: Regressions) -> dict[str, dict[str, list[str]]]:
    """Label -> "Won" and "Lost" -> sentences, the largest differences first."""
    return {
        label: {
            "Won": _sentences(compared, label, compared.above),
            "Lost": _sentences(compared, label, compared.below),
        }
        for label in compared.labels
    }


def _sentences(compared: Regressions, label: str, cells: Sequence[Cell]) -> list[str]:
    if not any(cell.label == label for cell in compared.cells):
        return ["nothing that can be judged."]
    said = [_sentence(cell, compared.baseline) for cell in cells if cell.label == label]
    if len(said) > _LISTED:
        said[_LISTED:] = [f"and {len(said) - _LISTED} more."]
    return said or ["nothing beyond chance."]


def _sentence(cell: Cell, baseline: str) -> str:
    after, before = _shown(cell)
    what = cell.sentence or f"{cell.name}: the {'score' if cell.higher_is_better else 'loss'} is {{}}"
    return f"{what.replace('{}', after)}, {baseline} {before}."


def _shown(cell: Cell) -> list[str]:
    """The model's share and the baseline's, or exp(-loss), in percent, with as many digits as tell them apart.

    A loss of which no sentence speaks of the right next token is shown in nats.
    """
    both = (cell.mean, cell.first)
    in_nats = not cell.higher_is_better and not cell.sentence
    for digits in range(0 if cell.higher_is_better else 1, 7):
        shown = [
            f"no number (a loss of {x})"
            if not isfinite(x)
            else f"{x:.{digits}f} nats"
            if in_nats
            else f"{100 * (x if cell.higher_is_better else exp(-x)):.{digits}f} %"
            for x in both
        ]
        if len(set(shown)) == len(shown):
            break
    return shown


def notes(compared: Regressions) -> list[str]:
    """What a reader of `changes` has to know: what may be chance, what was too little to show anything."""
    if not compared.labels:
        return [f"Only {compared.baseline} was measured, so there is nothing to compare it with."]
    sentences = ["All other differences may be chance."]
    if any(cell.sentence and not cell.higher_is_better for cell in compared.above + compared.below):
        sentences.append("The probability of the right next token is the geometric mean over tokens, exp(-loss).")
    sentences += dict.fromkeys(cell.note for cell in compared.cells if cell.note)
    return [*sentences, *_unseen(compared)]


def _unseen(compared: Regressions) -> list[str]:
    """The smallest change of answers that this number of prompts can show."""
    of_trials = {name for name, measure in MEASURES.items() if "trials" in measure.settings}
    cells = [cell for cell in compared.cells if cell.measure in of_trials]
    asked = min([*(cell.n for cell in cells), *(1 for name in compared.single if name in of_trials)], default=None)
    if asked is None:
        return []
    flags = "`rope-patch extend --prompts` and `rope-patch eval --trials` set the number."
    if asked < MIN_DIFFERENT:
        return [
            f"Prompts of each length: {asked}. Changes of answers are judged from {MIN_DIFFERENT} prompts on. {flags}"
        ]
    least = max(map(least_difference, cells))
    return [
        f"With {asked} prompts a length, changes of less than about {100 * least:.0f} percentage points may stay "
        f"unseen. {flags}"
    ]


def figure_rows(results: Mapping[str, Mapping[str, Result]], window: int | None) -> dict[str, dict[str, str]]:
    """What was measured -> label -> figure, as a table shows it: of several models of a method, mean and range."""
    rows: dict[str, dict[str, str]] = {}
    for by_label in results.values():
        for method, labels in runs_of_methods(by_label).items():
            for figure in zip(*(by_label[label].figures(window) for label in labels), strict=False):
                (what, form, _), values = figure[0], [value for *_, value in figure]
                spread = f" ({form % min(values)} to {form % max(values)})" if min(values) < max(values) else ""
                rows.setdefault(what, {})[method] = form % fmean(values) + spread
    return rows
