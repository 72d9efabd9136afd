"""What the model does before and after, and what was won and lost."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rope_patch.eval import MEASURES, EvalPlan, LossByPosition, Result, regressions, run_suite, write_report
from rope_patch.eval.prompt_grid import DEPTHS
from rope_patch.eval.retrieval_grid import RetrievalGrid

from .choices import Choices
from .facts import ModelFacts
from .texts import Texts

BEFORE, AFTER = "native", "extended"
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
    label: str, folder: str | Path, facts: ModelFacts, plan: EvalPlan, texts: Texts, device: str, cache: Path
) -> dict[str, Any]:
    """Results by measure, as JSON values, of the checkpoint in `folder`, in its own dtype on a GPU."""

    def load() -> Any:
        dtype = torch.float32 if device == "cpu" else facts.dtype
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.to(device).eval()

    results = run_suite({label: load}, facts.tokenizer, texts.held_out, plan, cache)
    return {name: by_label[label].to_dict() for name, by_label in results.items()}


def together(before: dict[str, Any], after: dict[str, Any]) -> Results:
    """Measure -> label -> result, of what `measure` gave of both."""
    return {
        name: {label: MEASURES[name][1].from_dict(values[name]) for label, values in ((BEFORE, before), (AFTER, after))}
        for name in before
    }


def report(
    results: Results, folder: Path, name: str, plan: EvalPlan, choices: Choices, settings: dict[str, Any]
) -> Path:
    """The page with figures, what was won and lost, and every choice."""
    told = {choice.name: str(choice) for choice in choices.all}
    return write_report(
        results,
        folder,
        title=f"{name}, extended to {plan.length:,} positions",
        settings={**settings, **told},
        window=plan.window,
    )


def table(results: Results, window: int) -> list[str]:
    """Before and after, a line a figure."""
    lines = [f"{'':42}{'before':>9}{'after':>9}"]
    for name, by_label in results.items():
        before, after = by_label[BEFORE], by_label[AFTER]
        if isinstance(before, RetrievalGrid) and isinstance(after, RetrievalGrid):
            what = "passkeys found" if name == "passkey" else "keys among look-alikes found"
            lines += [
                f"{f'{what} at {n:,} tokens':42}{100 * a:7.0f} %{100 * b:7.0f} %"
                for n, a, b in zip(before.lengths, before.by_length, after.by_length, strict=True)
            ]
        elif isinstance(before, LossByPosition) and isinstance(after, LossByPosition):
            inside = before.in_window(window), after.in_window(window)
            beyond = inside[0] + before.cliff(window), inside[1] + after.cliff(window)
            lines.append(f"{f'loss to position {window:,}, in nats':42}{inside[0]:9.3f}{inside[1]:9.3f}")
            lines.append(f"{f'loss from there to {before.seq_len:,}':42}{beyond[0]:9.3f}{beyond[1]:9.3f}")
    return lines


def verdict(results: Results, window: int) -> list[str]:
    """What was won and lost, in sentences."""
    compared = regressions(results, window=window)
    said = []
    for word, cells in (("Won", compared.above), ("Lost", compared.below)):
        listed = "; ".join(_said(cell) for cell in cells)
        said.append(f"{word}: {listed}." if cells else f"{word}: nothing that is beyond chance.")
    shares = [cell for cell in compared.cells if cell.higher_is_better]
    if shares:
        widest = max((cell.high - cell.low) / 2 for cell in shares)
        said.append(
            f"With {shares[0].n} prompts a length, changes of less than about "
            f"{max(100 * widest, 100 / shares[0].n):.0f} points may go unseen: --prompts asks more."
        )
    else:
        said.append("So few prompts were asked that answers cannot be compared: --prompts asks more.")
    return said


def _said(cell: Any) -> str:
    if cell.higher_is_better:
        return f"{cell.name} tokens, {100 * cell.first:.0f} to {100 * cell.mean:.0f} %"
    return f"{cell.name}, {cell.first:.2f} to {cell.mean:.2f}"
