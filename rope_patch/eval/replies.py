"""Replies of the models to the same prompts: scores alone hide an answer that is right in other words."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from .regressions import Regressions
from .results.result import Result

_CHARACTERS = 400  # of a reply that the page shows


def shown_replies(
    results: Mapping[str, Mapping[str, Result]], compared: Regressions, n: int = 3
) -> list[dict[str, Any]]:
    """`n` prompts that all models got, with each model's answer.

    Prompts of lost cells come first, the largest loss in front. Then come the shortest length, the longest, and the
    longest within the window, each from another measure if there are several. If there are fewer cells than prompts,
    each cell is shown again in another wording.

    Args:
        results: measure -> label -> result.
        compared: the same results, compared.
        n: number of prompts.

    Returns:
        For each prompt {measure, length, wording, question, expected, answers}, with answers {label, reply, score}.
    """
    asked = _asked(results)
    lost = sorted(compared.below, key=lambda c: c.effect)
    chosen = [(cell.measure, cell.length) for cell in lost if cell.higher_is_better]
    lengths = sorted({length for _, length in asked if length is not None})
    inside = [length for length in lengths if compared.window is not None and length <= compared.window]
    spread = list(dict.fromkeys([*lengths[:1], *lengths[-1:], *inside[-1:], *lengths]))
    measures = list(dict.fromkeys(measure for measure, _ in asked))
    for k, length in enumerate(spread):
        in_turn = measures[k % len(measures) :] + measures[: k % len(measures)]
        chosen += [(measure, length) for measure in in_turn]
    chosen += list(asked)
    cells = list(dict.fromkeys(cell for cell in chosen if cell in asked))
    in_turns = [prompt for turn in zip_longest(*(asked[cell] for cell in cells)) for prompt in turn]
    return [prompt for prompt in in_turns if prompt is not None][:n]


def longest_question(results: Mapping[str, Mapping[str, Result]]) -> dict[str, Any] | None:
    """One of the longest prompts of the first measure that has lengths, with the answers, as in `shown_replies`.

    It is the first that not all models answer equally well, or else the first; None without one.
    """
    asked = {cell: prompts for cell, prompts in _asked(results).items() if cell[1] is not None}
    if not asked:
        return None
    first = next(iter(asked))[0]  # the measure that comes first
    prompts = asked[max((cell for cell in asked if cell[0] == first), key=lambda cell: cell[1] or 0)]
    return next((p for p in prompts if len({a["score"] for a in p["answers"]}) > 1), prompts[0])


def _asked(results: Mapping[str, Mapping[str, Result]]) -> dict[tuple[str, int | None], list[dict[str, Any]]]:
    """(measure, length) -> prompts with the answers of all models; each cell begins with another wording."""
    cells: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for measure, by_label in results.items():
        kept = {label: getattr(result, "replies", []) for label, result in by_label.items()}
        by_cell: dict[tuple[str, int | None], list[dict[str, dict[str, Any]]]] = {}
        for replies in zip(*kept.values(), strict=False):
            asked = replies[0]
            if any((r.get("length"), r["question"]) != (asked.get("length"), asked["question"]) for r in replies):
                continue  # the models got different prompts
            name = f"{measure} {asked['task']}" if "task" in asked else measure
            by_cell.setdefault((name, asked.get("length")), []).append(dict(zip(kept, replies, strict=True)))
        for number, (cell, prompts) in enumerate(by_cell.items()):
            first = number % len(prompts)
            cells[cell] = [_page_prompt(*cell, answers) for answers in prompts[first:] + prompts[:first]]
    return cells


def _page_prompt(measure: str, length: int | None, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A prompt as the page shows it; `answers` maps labels to replies."""
    first = next(iter(answers.values()))
    return {
        "measure": measure,
        "length": length,
        "wording": first.get("wording"),
        "question": first["question"],
        "expected": first["expected"],
        "answers": [
            {"label": label, "reply": answer["reply"][:_CHARACTERS], "score": answer["score"]}
            for label, answer in answers.items()
        ],
    }
