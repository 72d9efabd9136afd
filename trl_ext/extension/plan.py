"""The plan of an extension: what it will do, and the memory and time that it needs."""

import textwrap
from dataclasses import dataclass, fields

from ..engines.device import free_memory
from ..memory.step import Memory, Step, peak_memory
from ..rows.mix import SHORTER, rows_by_kind
from ..rows.sampling import AT_ONCE
from .choices import Choices
from .duration import ROUGH, Rate, forward_calls, forward_operations, step_calls, step_operations
from .facts import ModelFacts
from .machine import GIB, Machine
from .options import ExtendOptions
from .short_rows import batches_a_step
from .training import RECIPE, n_steps
from .writing import seconds_a_step, seconds_of_writing

_WIDTH = 110  # characters of a line
_PATIENCE = 60  # minutes
_FEW_STEPS = 10
_ANSWERS = {"cuda": 8.0, "cpu": 0.0}  # seconds a length, to capture graphs and generate answers (SmolLM2, one H200)
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "teacher": "teacher, a copy of the original model",
    "casts": "weights in 16 bits",
    "activations": "activations",
    "loss": "loss, with logits of some tokens at a time",
}


@dataclass(frozen=True)
class Minutes:
    """Minutes of each stage."""

    measure: float
    write: float
    train: float

    @property
    def total(self) -> float:
        """Minutes of all stages; measuring is done twice."""
        return 2 * self.measure + self.write + self.train


@dataclass(frozen=True)
class ExtensionPlan:
    """The plan of an extension. `print` it.

    Args:
        facts: of the model.
        choices: every decision with its reason.
        memory: at the peak of a training step.
        minutes: estimated by a short calibration of this machine, right within a factor of `duration.ROUGH`.
        rows: training rows, including short ones.
        tokens: in all rows.
        steps: optimizer steps.
        measured_on: source of the held-out text.
        machine: that runs the extension.
        options: of the user.
    """

    facts: ModelFacts
    choices: Choices
    memory: Memory
    minutes: Minutes
    rows: int
    tokens: int
    steps: int
    measured_on: str
    machine: Machine
    options: ExtendOptions

    @classmethod
    def of(
        cls, facts: ModelFacts, options: ExtendOptions, choices: Choices, machine: Machine, measured_on: str
    ) -> "ExtensionPlan":
        """Count rows and tokens, and estimate memory and time."""
        step = choices.step(machine.device)
        counts = row_counts(choices)
        rate = machine.calibrate(choices.precision.value)
        return cls(
            facts=facts,
            choices=choices,
            memory=peak_memory(facts.size, step),
            minutes=_minutes(facts, options, choices, step, rate, counts),
            rows=sum(counts.values()),
            tokens=sum(length * count for length, count in counts.items()),
            steps=n_steps(sum(counts.values()), options.rows_per_step),
            measured_on=measured_on,
            machine=machine,
            options=options,
        )

    def __str__(self) -> str:
        device = f"{self.machine.name} with {self.machine.memory / GIB:.1f} free"
        short, most = self.choices.rows.value["length"] // SHORTER, min(SHORTER, self.options.rows_per_step)
        batches = "one row at a time"
        if short in row_counts(self.choices) and most > 1:
            batches += f", up to {most} neighbours of {short:,} tokens together"
        lines = [
            f"The model: {self.facts.full_name}",
            *(f"  {line}" for line in self.facts.lines()),
            "",
            f"How the context window becomes {self.options.to:,} positions, and why",
            *(_wrapped(str(choice)) for choice in self.choices.all),
            _wrapped(f"measured on: {self.measured_on}. [--held-out]"),
            "  [measured] is for SmolLM2-135M-Instruct from 8,192 to 65,536, three seeds; other models may differ.",
            "",
            f"Training: {self.tokens:,} tokens in {self.rows:,} rows, {self.steps:,} steps of "
            f"{self.options.rows_per_step} rows, {batches}",
            f"  {self.options.folder / RECIPE} will be its recipe for `rope-patch train`.",
            *(["  So few steps show that it runs, not what it gives."] if self.steps < _FEW_STEPS else []),
            f"Memory at the peak of a step, in GiB, on {device}:",
            *(
                f"  {getattr(self.memory, part.name) / GIB:8.2f}  {_PARTS[part.name]}"
                for part in fields(self.memory)
                if getattr(self.memory, part.name)
            ),
            f"  {self.memory.total / GIB:8.2f}  together",
            f"Minutes, by a short calibration of this machine; they may be off by {ROUGH:g} times, either way:",
            f"  {self.minutes.measure:8.1f}  measuring the model as it is",
            *([f"  {self.minutes.write:8.1f}  texts that it writes itself"] if self.minutes.write else []),
            f"  {self.minutes.train:8.1f}  training",
            f"  {self.minutes.measure:8.1f}  measuring it again",
            f"  {self.minutes.total:8.1f}  together ({_hours(self.minutes.total)})",
        ]
        if self.machine.device == "cpu" and self.minutes.total > _PATIENCE:
            near, target = self.facts.window // 4, self.facts.window * 9 // 8
            lines += [
                "A CPU is slow. These options end sooner, with a worse model and a shorter context window:",
                f"  --to {target} --rows 12 --row-length {near // 2} --short 0 --shares text=1,questions=1 --prompts 2 "
                f"--lengths {near} {target}",
            ]
        return "\n".join(lines)


def _wrapped(text: str) -> str:
    """A list item, wrapped."""
    return textwrap.fill(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _hours(minutes: float) -> str:
    if minutes >= 120:
        return f"{minutes / 60:.0f} hours"
    return "1 minute" if minutes < 1.5 else f"{minutes:.0f} minutes"


def row_counts(choices: Choices) -> dict[int, int]:
    """Tokens of a row -> rows."""
    value = choices.rows.value
    length, long, short = value["length"], 0, 0
    for count in rows_by_kind(value["n"], value["shares"]).values():
        cut = round(value["short"] * count)
        long, short = long + count - cut, short + SHORTER * cut
    return {size: count for size, count in ((length, long), (length // SHORTER, short)) if count}


def own_tokens(choices: Choices) -> int:
    """Tokens that the model writes itself: as many as its rows hold, at most `own_tokens`."""
    value = choices.rows.value
    own = sum(
        count for kind, count in rows_by_kind(value["n"], value["shares"]).items() if kind in ("chats", "own_texts")
    )
    return min(value["own_tokens"], own * value["length"])


def _minutes(
    facts: ModelFacts, options: ExtendOptions, choices: Choices, step: Step, rate: Rate, counts: dict[int, int]
) -> Minutes:
    size, measuring, to = facts.size, choices.evaluation.value, options.to
    calls = forward_calls(size)
    operations = sum(count * step_operations(size, step, length) for length, count in counts.items())
    train = rate.seconds(operations, _batches(choices, options) * step_calls(size, step))
    n_asking = len(measuring["measures"]) - 1  # measures that ask questions: all but the loss
    lengths = [*measuring["lengths"] * measuring["prompts"] * n_asking, *[to] * measuring["n_rows"]]
    measure = sum(rate.seconds(forward_operations(size, length), calls) for length in lengths)
    measure += _ANSWERS[step.device] * len(measuring["lengths"]) if n_asking else 0.0
    write, tokens = 0.0, own_tokens(choices)
    if tokens:
        seconds = seconds_a_step(facts, step.device)
        free_memory()
        if seconds is None:  # without a cache that can be timed
            seconds = rate.seconds(2.0 * size.parameters * AT_ONCE[step.device], calls)
        kinds = [kind for kind in ("chats", "own_texts") if kind in choices.rows.value["shares"]]
        write = sum(seconds_of_writing(facts, step.device, kind, tokens // len(kinds), seconds) for kind in kinds)
    return Minutes(measure=measure / 60, write=write / 60, train=train / 60)


def _batches(choices: Choices, options: ExtendOptions) -> float:
    """Batches that go through the model, each of one row or of several short ones."""
    length, counts = choices.rows.value["length"], row_counts(choices)
    rows = sum(counts.values())
    a_step = batches_a_step(options.rows_per_step, counts.get(length // SHORTER, 0) / rows, SHORTER)
    return rows / options.rows_per_step * a_step
