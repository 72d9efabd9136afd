"""What models wrote, beside what was asked for: figures alone hide an answer that is right in other words."""

from collections.abc import Mapping
from typing import Any

from .lm_eval_tasks import LmEval
from .regressions import Regressions
from .result import Result
from .retrieval import RetrievalGrid
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
    asked = _asked(results)
    wanted: list[tuple[str, int | None]] = []
    for cell in sorted(compared.below, key=lambda c: c.effect):
        if cell.higher_is_better:
            wanted.append((cell.measure, cell.length))
    lengths = sorted({length for _, length in asked if length is not None})
    inside = [length for length in lengths if compared.window is not None and length <= compared.window]
    spread = list(dict.fromkeys([*lengths[:1], *lengths[-1:], *inside[-1:], *lengths]))
    measures = list(dict.fromkeys(measure for measure, _ in asked))
    for k, length in enumerate(spread):
        in_turn = measures[k % len(measures) :] + measures[: k % len(measures)]
        wanted += [(measure, length) for measure in in_turn]
    wanted += list(asked)
    cells = list(dict.fromkeys(cell for cell in wanted if cell in asked))
    return [asked[cell] for cell in cells[:n]]


def _asked(results: Mapping[str, Mapping[str, Result]]) -> dict[tuple[str, int | None], dict[str, Any]]:
    """(measure, length) -> one prompt with the answers of all models; of wordings another one each time."""
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for measure, by_label in results.items():
        kept = {
            label: result.replies
            for label, result in by_label.items()
            if isinstance(result, RetrievalGrid | Ruler | LmEval)
        }
        by_cell: dict[tuple[str, int | None], list[dict[str, dict[str, Any]]]] = {}
        for k, replies in enumerate(zip(*kept.values(), strict=False)):
            one = replies[0]
            if any((r.get("length"), r["question"]) != (one.get("length"), one["question"]) for r in replies):
                continue  # the models were not asked the same
            name = f"{measure} {one['task']}" if "task" in one else measure
            same = dict(zip(kept, (of_label[k] for of_label in kept.values()), strict=True))
            by_cell.setdefault((name, one.get("length")), []).append(same)
        for number, (cell, prompts) in enumerate(by_cell.items()):
            answers = prompts[number % len(prompts)]
            one = next(iter(answers.values()))
            found[cell] = {
                "measure": cell[0],
                "length": cell[1],
                "wording": one.get("wording"),
                "question": one["question"],
                "expected": one["expected"],
                "answers": [
                    {"label": label, "reply": answer["reply"][:_CHARACTERS], "score": answer["score"]}
                    for label, answer in answers.items()
                ],
            }
    return found
