"""Measure the model before and after training, and report what was won and what was lost."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rope_patch.eval import MEASURES, EvalPlan, Result, run_suite, write_report
from rope_patch.eval.measures.prompt_grid import DEPTHS
from rope_patch.eval.replies import longest_question
from rope_patch.eval.verdict import figure_rows

from .choices import Choices
from .facts import ModelFacts
from .texts import Texts

BEFORE, UNTRAINED, AFTER = "before", "untrained", "after"
_LONGEST = 90  # characters of an answer that are shown
_WIDTH = 52  # characters of what was measured, in a table
Results = dict[str, dict[str, Result]]


def eval_plan(facts: ModelFacts, choices: Choices, seed: int) -> EvalPlan:
    """What is measured; prompts are spread over ten depths, or as many as there are prompts."""
    value = choices.evaluation.value
    prompts = value["prompts"]
    # shares of a text: the middles of as many equal parts
    depths = DEPTHS if prompts >= len(DEPTHS) else tuple((2 * k + 1) / (2 * prompts) for k in range(prompts))
    return EvalPlan(
        measures=tuple(name for name in MEASURES if name in value["measures"]),
        length=value["row_length"],
        n_rows=value["n_rows"],
        lengths=tuple(value["lengths"]),
        ruler_tasks=tuple(value["ruler_tasks"]),
        ruler_lengths=tuple(value["ruler_lengths"]),
        ruler_samples=value["ruler_samples"],
        trials=-(-prompts // len(depths)),
        depths=depths,
        window=facts.window,
        seed=seed,
    )


def measure(
    label: str,
    load: Callable[[torch.dtype], Any],
    facts: ModelFacts,
    plan: EvalPlan,
    texts: Texts,
    device: str,
    cache: Path,
) -> dict[str, Any]:
    """Results by measure, as JSON values, of the model that `load` returns; on a GPU in the dtype of its checkpoint."""

    def loaded() -> Any:
        return load(torch.float32 if device == "cpu" else facts.dtype).to(device).eval()

    # `extend` prints the figures itself
    results = run_suite({label: loaded}, facts.tokenizer, texts.held_out, plan, cache, tell=lambda line: None)
    return {name: by_label[label].to_dict() for name, by_label in results.items()}


def load_plain(folder: Path, dtype: torch.dtype) -> Any:
    """A checkpoint as Transformers loads it, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def together(measured: dict[str, dict[str, Any]]) -> Results:
    """Measure -> label -> result, from label -> what `measure` returned."""
    return {
        name: {label: MEASURES[name].result.from_dict(values[name]) for label, values in measured.items()}
        for name in measured[BEFORE]
    }


def report(
    results: Results, folder: Path, facts: ModelFacts, to: int, choices: Choices, settings: dict[str, Any]
) -> Path:
    """Write the page with figures, changes and every choice."""
    name = Path(facts.name).name if Path(facts.name).is_dir() else facts.name
    reasons = {choice.name: choice.explained for choice in choices.all}
    reasons_note = (
        'Figures beside a choice, and the word "measured", are of our own earlier runs, on SmolLM2-135M-Instruct where '
        "no other model is named. They were not measured in this run."
    )
    return write_report(
        results,
        folder,
        title=f"{name}, extended to {to:,} positions",
        settings={**settings, "reasons": reasons_note, **reasons},
        window=facts.window,
    )


def log_verdict(verdict: list[str], report_to: Sequence[str], folder: Path) -> None:
    """Add the verdict to the logs of the training in `folder`: a text in TensorBoard, a table in W&B and trackio."""
    if "tensorboard" in report_to:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder / "runs/verdict") as writer:
            writer.add_text("verdict", "\n\n".join(verdict))
    if "wandb" in report_to:
        import wandb

        # a training in other processes, or of an earlier call, has ended its run
        run = wandb.run or wandb.init(project=os.environ.get("WANDB_PROJECT", "huggingface"), name="verdict")
        run.log({"verdict": wandb.Table(columns=["verdict"], data=[[sentence] for sentence in verdict])})
    if "trackio" in report_to:
        import trackio

        trackio.init(project="huggingface", name="verdict")  # the project of Transformers' runs
        trackio.log({"verdict": trackio.Table(columns=["verdict"], data=[[sentence] for sentence in verdict])})
        trackio.finish()


def table(results: Results, window: int) -> list[str]:
    """A table with a column for each model, a line a figure."""
    labels = next(iter(results.values()))
    lines = [f"{'':{_WIDTH}}" + "".join(f"{label:>11}" for label in labels)]
    for what, of in figure_rows(results, window).items():
        lines.append(f"{what:{_WIDTH}}" + "".join(f"{of[label]:>11}" for label in labels))
    return lines


def answers(results: Results) -> list[str]:
    """One of the longest prompts, and the answer of each model; nothing if no question was asked."""
    prompt = longest_question(results)
    if prompt is None:
        return []
    return [
        f"A question about a number in {prompt['length']:,} tokens of text. The number is {prompt['expected']}.",
        f"  question:  {_line(prompt['question'])}",
        *(f"  {answer['label'] + ':':11}{_line(answer['reply'])}" for answer in prompt["answers"]),
    ]


def _line(text: str) -> str:
    """In one line, cut if it is long."""
    words = " ".join(text.split())
    return (words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ...") or "(nothing)"
