"""What each model won and lost against the baseline, and its figures, in words: the opening of a report."""

from collections.abc import Mapping, Sequence
from math import exp, isfinite
from statistics import fmean

from .measures.comparisons import runs_of_methods
from .measures.loss_by_position import LossByPosition
from .measures.retrieval_grid import RetrievalGrid
from .measures.ruler_prompts import TASKS
from .regressions import Cell, Regressions, least_difference
from .results.paired import MIN_DIFFERENT
from .results.result import Result

NUMBERS = {
    "passkey": "passkeys",
    "several": "passkeys of several people",
    "niah-single": "single numbers hidden in text",
    "niah-multikey": "keys among look-alikes",
    "niah-multivalue": "numbers of one key",
    "niah-multiquery": "numbers of several keys",
    "niah-ordinal": "numbers asked for by their order",
}
"""Measure -> the numbers that its questions ask for."""
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
    after, before = _percents(cell)
    if not cell.higher_is_better:
        start, end = map(int, cell.name.removeprefix("loss ").split(".."))
        what = f"text at positions {start:,} to {end:,}: the right next token gets {after}"
    elif cell.measure in NUMBERS:
        what = f"{NUMBERS[cell.measure]} in {cell.length:,} tokens: {after} are found"
    elif cell.measure in TASKS:
        what = f"RULER's {cell.name} tokens: the score is {after}"
    else:
        what = f"{cell.name}: the score is {after}"
    return f"{what}, {baseline} {before}."


def _percents(cell: Cell) -> list[str]:
    """The model's share and the baseline's, or exp(-loss), in percent, with as many digits as tell them apart."""
    both = (cell.mean, cell.first)
    for digits in range(0 if cell.higher_is_better else 1, 7):
        percents = [
            f"{100 * (x if cell.higher_is_better else exp(-x)):.{digits}f} %"
            if isfinite(x)
            else f"no number (a loss of {x})"
            for x in both
        ]
        if len(set(percents)) == len(percents):
            break
    return percents


def notes(compared: Regressions) -> list[str]:
    """What a reader of `changes` has to know: what may be chance, what was too little to show anything."""
    if not compared.labels:
        return [f"Only {compared.baseline} was measured, so there is nothing to compare it with."]
    sentences = ["All other differences may be chance."]
    if any(not cell.higher_is_better for cell in compared.above + compared.below):
        sentences.append("The probability of the right next token is the geometric mean over tokens, exp(-loss).")
    if any(cell.is_of_one_text for cell in compared.cells):
        sentences.append(
            "Losses are those of a single row, and other texts may differ. "
            "`rope-patch eval --cliff --rows 8` compares both models on more."
        )
    if any(cell.measure == "several" for cell in compared.cells):
        sentences.append("The passkeys of several people stand in few texts, and other texts may differ.")
    return [*sentences, *_unseen(compared)]


def _unseen(compared: Regressions) -> list[str]:
    """The smallest change of answers that this number of prompts can show."""
    cells = [cell for cell in compared.cells if cell.measure in NUMBERS]
    asked = min([*(cell.n for cell in cells), *(1 for name in compared.single if name in NUMBERS)], default=None)
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
    for name, by_label in results.items():
        for method, labels in runs_of_methods(by_label).items():
            for figure in zip(*(figures(name, by_label[label], window) for label in labels), strict=False):
                (what, form, _), values = figure[0], [value for *_, value in figure]
                spread = f" ({form % min(values)} to {form % max(values)})" if min(values) < max(values) else ""
                rows.setdefault(what, {})[method] = form % fmean(values) + spread
    return rows


def figures(name: str, result: Result, window: int | None) -> list[tuple[str, str, float]]:
    """Each figure of a measure: what it is, its form, and its value."""
    if isinstance(result, RetrievalGrid):
        found = zip(result.lengths, result.by_length, strict=True)
        return [(f"{NUMBERS.get(name, name)} found at {n:,} tokens", "%.0f %%", 100 * share) for n, share in found]
    if isinstance(result, LossByPosition):
        end = min(window or result.seq_len, result.seq_len)
        inside = result.in_window(end)
        losses = [(f"loss to position {end:,}, in nats", "%.3f", inside)]
        if end + 1 < result.seq_len:
            losses.append((f"loss from there to {result.seq_len:,}", "%.3f", inside + result.cliff(end)))
        return losses
    return [(what, "%.3f", value) for what, value in result.headline().items()]
