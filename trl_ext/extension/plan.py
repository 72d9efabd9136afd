"""The plan of an extension: what it will do, and the memory and time that it needs."""

import textwrap
from dataclasses import dataclass

from ..engines.device import free_memory
from ..memory.step import Memory, peak_memory
from ..recipes.engine_advice import EngineNeed
from ..rows.mix import SHORTER, rows_by_kind
from ..rows.sampling import AT_ONCE
from .choices import Choices
from .duration import (
    H200_OPERATIONS,
    Rate,
    export_seconds,
    forward_calls,
    loading_seconds,
    saving_seconds,
    step_calls,
    step_operations,
)
from .facts import ModelFacts
from .fitting import command_of, engine_of, fits, measured_bytes, needed_bytes, remedies
from .machine import GIB, Machine
from .measuring import eval_plan
from .measuring_parts import Part, operations_of, parts_of, shares_of
from .options import ExtendOptions
from .short_rows import batches_a_step
from .training import n_steps, save_steps
from .writing import seconds_a_step, seconds_of_writing

_WIDTH = 110  # characters of a line
_PATIENCE = 60  # minutes
_FEW_STEPS = 10
_ANSWERS = {"cuda": 8.0, "cpu": 0.0}  # seconds a length, to capture graphs and generate answers (SmolLM2, one H200)


@dataclass(frozen=True)
class Minutes:
    """Minutes of each stage."""

    measure: float
    write: float
    train: float
    export: float
    measurements: int

    @property
    def total(self) -> float:
        """Minutes of all stages."""
        return self.measurements * self.measure + self.write + self.train + self.export


@dataclass(frozen=True)
class ExtensionPlan:
    """The plan of an extension. `print` it.

    Args:
        facts: of the model.
        choices: every decision with its reason.
        memory: at the peak of a training step, on one GPU.
        engine: what each of several GPUs holds; None for one.
        remedies: what would make a training fit that does not; empty for one that does.
        minutes: estimated by a short calibration of this machine, or from steps on an H200 for a GPU that is not here,
            right within a factor of two.
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
    engine: EngineNeed | None
    remedies: list[str]
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
        engine = engine_of(facts, options, choices, machine)
        fit = fits(facts, choices, machine, engine)
        return cls(
            facts=facts,
            choices=choices,
            memory=peak_memory(facts.size, step),
            engine=engine,
            remedies=[] if fit else remedies(facts, options, choices, machine),
            minutes=_minutes(facts, options, choices, machine, engine, rate, counts),
            rows=sum(counts.values()),
            tokens=sum(length * count for length, count in counts.items()),
            steps=n_steps(sum(counts.values()), options.rows_per_step),
            measured_on=measured_on,
            machine=machine,
            options=options,
        )

    @property
    def fits(self) -> bool:
        """Whether the training fits."""
        return not self.remedies

    def __str__(self) -> str:
        elsewhere, n_gpus, hours = self.machine.rate is not None, self.machine.n_gpus, self.minutes.total / 60
        device = f"{self.machine.name} with {self.machine.memory / GIB:.1f} free"
        by = "by a short timing of this machine; they may be half as many, or twice"
        if elsewhere:
            device = f"a GPU of {self.machine.memory / GIB:.4g} that is not here"
            speed = f"{H200_OPERATIONS / 1e12:.0f} TFLOP/s"
            by = f"of H200s, by arithmetic at {speed}; a GPU of half the speed takes twice as long"
        lines = [
            f"The model: {self.facts.full_name}",
            *(f"  {line}" for line in self.facts.lines()),
            "",
            f"How the context window becomes {self.options.to:,} positions, and why",
            *(_wrapped(str(choice)) for choice in self.choices.all),
            _wrapped(f"measured on: {self.measured_on}. [--held-out]"),
            "  We measured SmolLM2-135M-Instruct from 8,192 to 65,536, in three seeds. Other models may differ.",
            "",
            f"Training: {self.tokens:,} tokens in {self.rows:,} rows, {self.steps:,} steps of "
            f"{self.options.rows_per_step} row{'s' * (self.options.rows_per_step > 1)}",
            *(["  So few steps show that it runs, not what it gives."] if self.steps < _FEW_STEPS else []),
            *self._memory_lines(device),
            f"Minutes {by}:",
            f"  {self.minutes.measure:8.1f}  measuring the model as it is",
            *([f"  {self.minutes.measure:8.1f}  measuring it untrained"] if self.options.untrained else []),
            *([f"  {self.minutes.write:8.1f}  texts that it writes itself"] if self.minutes.write else []),
            f"  {self.minutes.train:8.1f}  training{f' on {n_gpus} GPUs' if n_gpus > 1 else ''}",
            f"  {self.minutes.export:8.1f}  merging, writing and checking the checkpoint",
            f"  {self.minutes.measure:8.1f}  measuring it again",
            f"  {self.minutes.total:8.1f}  together{f', {hours:.1f} hours' if hours > 2 else ''}",
            "  Starting, loading and saving are counted. Downloading is not.",
        ]
        if self.machine.device == "cpu" and self.minutes.total > _PATIENCE:
            lines.append("A CPU is slow. A smaller --to and --row-length, and fewer --rows and --prompts, end sooner.")
        if not self.fits:
            lines += [f"DOES NOT FIT: {self.misfit}", *(f"  {remedy}" for remedy in self.remedies)]
        return "\n".join(lines)

    @property
    def misfit(self) -> str:
        """That the training does not fit, without remedies."""
        on = "this machine" if self.machine.device == "cpu" else "one GPU"
        if self.engine is not None:
            on = f"each of {self.machine.n_gpus} GPUs"
        needed = needed_bytes(self.facts, self.choices, self.machine, self.engine)
        what = "measuring the model with all weights on one GPU"
        if needed > measured_bytes(self.facts, self.machine):
            train = self.choices.weights.value["train"]
            what = f"training on rows of {self.choices.rows.value['length']:,} tokens ({train})"
        return (
            f"{what} needs {needed / GIB:.1f} GiB, and {self.machine.room / GIB:.1f} may be taken on {on}. Each of "
            "these would make it fit:"
        )

    def _memory_lines(self, device: str) -> list[str]:
        """Memory at the peak of a step: by part on one GPU; on several that of each, and the command that trains."""
        if self.engine is None:
            return [
                f"Memory at the peak of a step, in GiB, on {device}:",
                *(f"  {size / GIB:8.2f}  {part}" for part, size in self.memory.parts.items()),
                f"  {self.memory.total / GIB:8.2f}  together",
            ]
        engine, room, memory = self.engine, self.machine.room, self.machine.memory / GIB
        which = "you name" if self.options.accelerate_config else "fits and sends least" if self.fits else "takes least"
        is_long = engine.bytes_long < engine.bytes and engine.bytes > room
        held = engine.bytes_long if is_long else engine.bytes
        lines = [
            f"Memory at the peak of a step, in GiB, on each of {self.machine.n_gpus} GPUs of {memory:.4g}:",
            f"  {held / GIB:8.2f}  under {engine.config}, the engine that {which}"
            + (", with long_rows, which switches itself on" if is_long else ""),
        ]
        if self.fits:
            lines.append(f"  It trains as: rope-patch {' '.join(command_of(self.options, engine))}")
        return lines


def _wrapped(text: str) -> str:
    """A list item, wrapped."""
    return textwrap.fill(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def row_counts(choices: Choices) -> dict[int, int]:
    """Tokens of a row -> rows."""
    value = choices.rows.value
    length, long, short = value["length"], 0, 0
    for count in rows_by_kind(value["n"], value["shares"]).values():
        cut = round(value["short"] * count)
        long, short = long + count - cut, short + SHORTER * cut
    return {size: count for size, count in ((length, long), (length // SHORTER, short)) if count}


def own_tokens(choices: Choices) -> dict[str, int]:
    """Tokens that the model writes itself, by kind: as many as its rows hold, `own_tokens` of all kinds at most."""
    value = choices.rows.value
    rows = rows_by_kind(value["n"], value["shares"])
    own = {kind: rows[kind] for kind in ("chats", "own_texts") if rows.get(kind)}
    return {kind: min(value["own_tokens"] // len(own), count * value["length"]) for kind, count in own.items()}


def _minutes(
    facts: ModelFacts,
    options: ExtendOptions,
    choices: Choices,
    machine: Machine,
    engine: EngineNeed | None,
    rate: Rate,
    counts: dict[int, int],
) -> Minutes:
    size, measuring, step = facts.size, choices.evaluation.value, choices.step(machine.device)
    calls, n_gpus, n_rows = forward_calls(size), machine.n_gpus, sum(counts.values())
    checkpoint = size.parameters * facts.dtype.itemsize
    operations = sum(count * step_operations(size, step, length) for length, count in counts.items())
    # rows are joined by extend alone
    batches = _batches(choices, options) if n_gpus == 1 else n_rows
    train = rate.seconds(operations, batches * step_calls(size, step)) / n_gpus
    optimizer = peak_memory(size, step).optimizer  # two numbers of four bytes for each trained weight
    gathered = step.weight_bytes * size.parameters if engine is not None and "fsdp" in engine.config else 0
    steps = n_steps(n_rows, options.rows_per_step)
    saves = -(-steps // save_steps(steps))
    train += loading_seconds(checkpoint, n_gpus) + saving_seconds(optimizer * 3 // 2, gathered, saves)

    def seconds_of(part: Part) -> float:
        return rate.seconds(operations_of(size, part), part.count * calls)

    shares = shares_of(parts_of(eval_plan(facts, choices, options.seed)), n_gpus, seconds_of)
    measure = max(sum(map(seconds_of, share)) for share in shares)
    measure += _ANSWERS[step.device] * len({*measuring["lengths"], *measuring["ruler_lengths"]}) / n_gpus
    # what several processes measured, this one finds by the hash of the weights
    measure += loading_seconds(checkpoint, n_gpus, times=1 if n_gpus == 1 else 2)
    write, own = 0.0, own_tokens(choices)
    if own:
        seconds = seconds_a_step(facts, step.device) if machine.rate is None else None
        free_memory()
        if seconds is None:  # on a GPU that is not here, or without a cache that can be timed
            # one token of each text: a multiplication and an addition with each weight
            seconds = rate.seconds(2.0 * size.parameters * AT_ONCE[step.device], calls)
        write = sum(seconds_of_writing(facts, step.device, kind, tokens, seconds) for kind, tokens in own.items())
    export = export_seconds(size, checkpoint, machine.device, rate, machine.memory)
    measurements = 3 if options.untrained else 2
    return Minutes(measure / 60, write / 60, train / 60, export / 60, measurements)


def _batches(choices: Choices, options: ExtendOptions) -> float:
    """Batches that go through the model, each of one row or of several short ones."""
    length, counts = choices.rows.value["length"], row_counts(choices)
    rows = sum(counts.values())
    a_step = batches_a_step(options.rows_per_step, counts.get(length // SHORTER, 0) / rows, SHORTER)
    return rows / options.rows_per_step * a_step
