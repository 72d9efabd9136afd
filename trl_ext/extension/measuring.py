"""Measure the model before and after training, and report what improved or got worse."""

from math import exp, isfinite
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rope_patch.eval import MEASURES, EvalPlan, LossByPosition, Result, regressions, run_suite, write_report
from rope_patch.eval.measures.prompt_grid import DEPTHS
from rope_patch.eval.measures.retrieval_grid import RetrievalGrid
from rope_patch.eval.regressions import Cell, Regressions, least_difference
from rope_patch.eval.results.paired import MIN_DIFFERENT

from .choices import Choices
from .facts import ModelFacts
from .texts import Texts

BEFORE, AFTER = "native", "extended"
_LONGEST = 90  # characters of an answer that are shown
Results = dict[str, dict[str, Result]]


def eval_plan(facts: ModelFacts, to: int, choices: Choices, seed: int) -> EvalPlan:
    """What is measured; prompts are spread over ten depths, or as many as there are prompts."""
    value = choices.evaluation.value
    prompts = value["prompts"]
    depths = DEPTHS if prompts >= len(DEPTHS) else tuple((2 * k + 1) / (2 * prompts) for k in range(prompts))
    return EvalPlan(
        measures=tuple(name for name in MEASURES if name in value["measures"]),
        length=to,
        n_rows=value["n_rows"],
        lengths=tuple(value["lengths"]),
        trials=-(-prompts // len(depths)),
        depths=depths,
        window=facts.window,
        seed=seed,
    )


def measure(
    label: str, folder: Path | None, facts: ModelFacts, plan: EvalPlan, texts: Texts, device: str, cache: Path
) -> dict[str, Any]:
    """Results by measure, as JSON values, of the checkpoint in `folder`; None is the original model.

    On a GPU it runs in the dtype of its checkpoint.
    """

    def load() -> Any:
        dtype = torch.float32 if device == "cpu" else facts.dtype
        model: Any = facts.load(dtype) if folder is None else AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.to(device).eval()

    # `extend` prints the figures itself
    results = run_suite({label: load}, facts.tokenizer, texts.held_out, plan, cache, tell=lambda line: None)
    return {name: by_label[label].to_dict() for name, by_label in results.items()}


def together(before: dict[str, Any], after: dict[str, Any]) -> Results:
    """Measure -> label -> result, from the two returns of `measure`."""
    return {
        name: {
            label: MEASURES[name].result.from_dict(values[name]) for label, values in ((BEFORE, before), (AFTER, after))
        }
        for name in before
    }


def report(
    results: Results, folder: Path, name: str, plan: EvalPlan, choices: Choices, settings: dict[str, Any]
) -> Path:
    """Write the page with figures, changes and every choice."""
    reasons = {choice.name: choice.explained for choice in choices.all}
    return write_report(
        results,
        folder,
        title=f"{name}, extended to {plan.length:,} positions",
        settings={**settings, **reasons},
        window=plan.window,
    )


def table(results: Results, window: int) -> list[str]:
    """A table of before and after, a line a figure."""
    lines = [f"{'':42}{'before':>9}{'after':>9}"]
    for name, by_label in results.items():
        both = (_figures(name, by_label[label], window) for label in (BEFORE, AFTER))
        lines += [f"{what:42}{before:>9}{after:>9}" for (what, before), (_, after) in zip(*both, strict=True)]
    return lines


def lines(measured: dict[str, Any], window: int) -> list[str]:
    """The results of `measure` for one model, a line a figure."""
    results = {name: MEASURES[name].result.from_dict(values) for name, values in measured.items()}
    return [f"  {what:42}{value:>9}" for name in results for what, value in _figures(name, results[name], window)]


def _figures(name: str, result: Result, window: int) -> list[tuple[str, str]]:
    """Each figure of a measure: what it is, and its value."""
    if isinstance(result, RetrievalGrid):
        what = "passkeys found" if name == "passkey" else "keys among look-alikes found"
        found = zip(result.lengths, result.by_length, strict=True)
        return [(f"{what} at {n:,} tokens", f"{100 * share:.0f} %") for n, share in found]
    if isinstance(result, LossByPosition):
        inside, cliff = result.in_window(window), result.cliff(window)
        return [
            (f"loss to position {window:,}, in nats", f"{inside:.3f}"),
            (f"loss from there to {result.seq_len:,}", f"{inside + cliff:.3f}"),
        ]
    return []


def verdict(results: Results, window: int) -> list[str]:
    """What improved and what got worse, in sentences."""
    compared = regressions(results, window=window)
    sentences = []
    for word, cells in (("Won", compared.above), ("Lost", compared.below)):
        changes = [_sentence(cell) for cell in cells] or ["nothing beyond chance."]
        sentences += [f"{word + ':':6}{change}" for change in changes]
    if any(not cell.higher_is_better for cell in compared.above + compared.below):
        sentences.append("The probability of the right next token is the geometric mean over tokens, exp(-loss).")
    if any(cell.is_of_one_text for cell in compared.cells):
        sentences.append(
            "Losses are those of a single row, and other texts may differ. "
            "`rope-patch eval --cliff --rows 8` compares both models on more."
        )
    return [*sentences, *_unseen(results, compared)]


def _sentence(cell: Cell) -> str:
    if cell.higher_is_better:
        what = "passkeys" if cell.measure == "passkey" else "keys among look-alikes"
        return f"{what} in {cell.length:,} tokens: {100 * cell.mean:.0f} % are found, before {100 * cell.first:.0f} %."
    start, end = map(int, cell.name.removeprefix("loss ").split(".."))
    after, before = _probabilities(cell.mean, cell.first)
    return f"text at positions {start:,} to {end:,}: the right next token gets {after}, before {before}."


def _probabilities(*losses: float) -> list[str]:
    """exp(-loss) of losses that differ, in percent, with as many digits as show that."""
    for digits in range(1, 7):
        percents = [
            f"{100 * exp(-loss):.{digits}f} %" if isfinite(loss) else f"no number (a loss of {loss})" for loss in losses
        ]
        if len(set(percents)) == len(percents):
            break
    return percents


def _unseen(results: Results, compared: Regressions) -> list[str]:
    """The smallest change of answers that this number of prompts can show."""
    asked = [
        len(result.at(length))
        for by_label in results.values()
        for result in by_label.values()
        if isinstance(result, RetrievalGrid)
        for length in result.lengths
    ]
    if not asked:
        return []
    if asked[0] < MIN_DIFFERENT:
        return [
            f"Prompts of each length: {asked[0]}. Changes of answers are judged from {MIN_DIFFERENT} prompts on; "
            "--prompts sets the number."
        ]
    least = max(least_difference(cell) for cell in compared.cells if cell.higher_is_better)
    return [
        f"With {asked[0]} prompts a length, changes of less than about {100 * least:.0f} percentage points "
        "may stay unseen: increase --prompts."
    ]


def answers(results: Results) -> list[str]:
    """One of the longest prompts, and the answers before and after; nothing if no question was asked."""
    for by_label in results.values():
        before, after = by_label[BEFORE], by_label[AFTER]
        if isinstance(before, RetrievalGrid) and isinstance(after, RetrievalGrid):
            length = max(before.lengths)
            pairs = [(a, b) for a, b in zip(before.replies, after.replies, strict=True) if a["length"] == length]
            for one, other in pairs[:1]:
                return [
                    f"A question about a number far back in {length:,} tokens. The number is {one['expected']}.",
                    f"  question: {_line(one['question'])}",
                    f"  before:   {_line(one['reply'])}",
                    f"  after:    {_line(other['reply'])}",
                ]
    return []


def _line(text: str) -> str:
    """In one line, cut if it is long."""
    words = " ".join(text.split())
    return (words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ...") or "(nothing)"
