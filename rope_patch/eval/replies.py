"""What models wrote, beside what was asked for: figures alone hide an answer that is right in other words."""

from collections.abc import Mapping
from typing import Any

from .lm_eval_tasks import LmEval
from .regressions import Regressions
from .result import Result
from .retrieval_grid import RetrievalGrid
from .ruler import Ruler

_CHARACTERS = 400  # of a reply that the page shows


def shown_replies(
    results: Mapping[str, Mapping[str, Result]], compared: Regressions, n: int = 3
) -> list[dict[str, Any]]:
    """`n` prompts that all models were asked, with each model's answer.

    Prompts of cells where a model lost come first, the worst in front. Then come the shortest length, the longest, and
    the longest within the window, each of another measure if there are several.

    Args:
        results: measure -> label -> result.
        compared: what was lost and won.
        n: prompts.

    Returns:
        For each prompt {measure, length, wording, question, expected, answers}, with answers {label, reply, score}.
    """
    first_replies = _asked(results)
    chosen: list[tuple[str, int | None]] = []
    for cell in sorted(compared.below, key=lambda c: c.effect):
        if cell.higher_is_better:
            chosen.append((cell.measure, cell.length))
    lengths = sorted({length for _, length in first_replies if length is not None})
    inside = [length for length in lengths if compared.window is not None and length <= compared.window]
    spread = list(dict.fromkeys([*lengths[:1], *lengths[-1:], *inside[-1:], *lengths]))
    measures = list(dict.fromkeys(measure for measure, _ in first_replies))
    for k, length in enumerate(spread):
        in_turn = measures[k % len(measures) :] + measures[: k % len(measures)]
        chosen += [(measure, length) for measure in in_turn]
    chosen += list(first_replies)
    cells = list(dict.fromkeys(cell for cell in chosen if cell in first_replies))
    return [first_replies[cell] for cell in cells[:n]]


def _asked(results: Mapping[str, Mapping[str, Result]]) -> dict[tuple[str, int | None], dict[str, Any]]:
    """(measure, length) -> one prompt with the answers of all models; of wordings another one each time."""
    cells: dict[tuple[str, int | None], dict[str, Any]] = {}
    for measure, by_label in results.items():
        kept = {
            label: result.replies
            for label, result in by_label.items()
            if isinstance(result, RetrievalGrid | Ruler | LmEval)
        }
        by_cell: dict[tuple[str, int | None], list[dict[str, dict[str, Any]]]] = {}
        for k, replies in enumerate(zip(*kept.values(), strict=False)):
            first = replies[0]
            if any((r.get("length"), r["question"]) != (first.get("length"), first["question"]) for r in replies):
                continue  # the models were not asked the same
            name = f"{measure} {first['task']}" if "task" in first else measure
            same = dict(zip(kept, (of_label[k] for of_label in kept.values()), strict=True))
            by_cell.setdefault((name, first.get("length")), []).append(same)
        for number, (cell, prompts) in enumerate(by_cell.items()):
            answers = prompts[number % len(prompts)]
            first = next(iter(answers.values()))
            cells[cell] = {
                "measure": cell[0],
                "length": cell[1],
                "wording": first.get("wording"),
                "question": first["question"],
                "expected": first["expected"],
                "answers": [
                    {"label": label, "reply": answer["reply"][:_CHARACTERS], "score": answer["score"]}
                    for label, answer in answers.items()
                ],
            }
    return cells
