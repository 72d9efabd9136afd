"""The plan of an extension: what it will do, and the memory and time that it needs."""

import textwrap
from dataclasses import dataclass

from rope_patch.eval.measures.prompt_grid import DEPTHS

from ..engines.device import free_memory
from ..memory.step import Memory, peak_memory
from ..recipes.engine_advice import EngineNeed
from ..rows.mix import SHORTER, rows_by_kind
from ..rows.sampling import AT_ONCE
from .choices import Choices
from .duration import H200_OPERATIONS, ROUGH, Rate, export_seconds, forward_calls, step_calls, step_operations
from .facts import ModelFacts
from .fitting import command_of, engine_of, fits, measured_bytes, needed_bytes, remedies
from .machine import GIB, Machine
from .measuring import eval_plan
from .measuring_parts import Part, operations_of, parts_of, shares_of
from .options import ExtendOptions
from .short_rows import batches_a_step
from .training import RECIPE, n_steps
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
            right within a factor of `duration.ROUGH`.
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
            minutes=_minutes(facts, options, choices, machine, rate, counts),
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
        elsewhere, n_gpus = self.machine.rate is not None, self.machine.n_gpus
        device = f"{self.machine.name} with {self.machine.memory / GIB:.1f} free"
        by = f", by a short calibration of this machine; they may be off by {ROUGH:g} times, either way"
        if elsewhere:
            device = f"a GPU of {self.machine.memory / GIB:.4g} that is not here"
            by = f" on an H200 [arithmetic from steps on an H200, {H200_OPERATIONS / 1e12:.0f} TFLOP/s]"
        short, most = self.choices.rows.value["length"] // SHORTER, min(SHORTER, self.options.rows_per_step)
        batches = "one row at a time"
        if short in row_counts(self.choices) and most > 1 and n_gpus == 1:
            batches += f", up to {most} neighbours of {short:,} tokens together"
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
            f"{self.options.rows_per_step} row{'s' * (self.options.rows_per_step > 1)}, {batches}",
            f"  {self.options.folder / RECIPE} will be its recipe for `rope-patch train`.",
            *(["  So few steps show that it runs, not what it gives."] if self.steps < _FEW_STEPS else []),
            f"Memory at the peak of a step, in GiB, on {device}:",
            *(f"  {size / GIB:8.2f}  {part}" for part, size in self.memory.parts.items()),
            f"  {self.memory.total / GIB:8.2f}  together",
            *self._engine_lines(),
            f"Minutes{by}:",
            f"  {self.minutes.measure:8.1f}  measuring the model as it is",
            *([f"  {self.minutes.measure:8.1f}  measuring it untrained"] if self.options.untrained else []),
            *([f"  {self.minutes.write:8.1f}  texts that it writes itself"] if self.minutes.write else []),
            f"  {self.minutes.train:8.1f}  training"
            + (f" on {n_gpus} GPUs, as if they never waited for each other" if n_gpus > 1 else ""),
            f"  {self.minutes.export:8.1f}  merging, writing and checking the checkpoint",
            f"  {self.minutes.measure:8.1f}  measuring it again",
            f"  {self.minutes.total:8.1f}  together ({_hours(self.minutes.total)})",
        ]
        if elsewhere:
            lines.append("  A GPU with half the speed of an H200 in bfloat16 takes about twice as long.")
        if self.machine.device == "cpu" and self.minutes.total > _PATIENCE:
            lines += self._quicker()
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

    def _engine_lines(self) -> list[str]:
        """What each of several GPUs holds, and the command that trains on them."""
        if self.engine is None:
            return []
        engine, n_gpus, room = self.engine, self.machine.n_gpus, self.machine.room
        which = "you name" if self.options.accelerate_config else "fits and sends least" if self.fits else "takes least"
        is_long = engine.bytes_long < engine.bytes and engine.bytes > room
        held = engine.bytes_long if is_long else engine.bytes
        lines = [
            f"Memory on each of {n_gpus} such GPUs, under the engine that {which}:",
            f"  {held / GIB:8.2f}  {engine.config}{', with long_rows, which switches itself on' if is_long else ''}",
        ]
        if not self.fits:
            return lines
        command = " ".join(command_of(self.options, engine))
        return [*lines, "extend starts the training on them, as this command would:", f"  rope-patch {command}"]

    def _quicker(self) -> list[str]:
        """Options with which a CPU ends sooner, of those that were not given already."""
        options, near, target = self.options, self.facts.window // 4, self.facts.window * 9 // 8
        own = {"chats", "own_texts"} & self.choices.rows.value["shares"].keys()
        flags = {
            f"--to {target}": options.to > target,
            "--rows 12": options.rows is None or options.rows > 12,
            f"--row-length {near // 2}": options.row_length is None or options.row_length > near // 2,
            "--short 0": options.short != 0,
            "--shares text=1,questions=1": bool(own),
            "--prompts 10": options.prompts is not None and options.prompts > len(DEPTHS),
            f"--lengths {near} {target}": not options.lengths or max(options.lengths) > target,
        }
        hint = " ".join(flag for flag, is_of_use in flags.items() if is_of_use)
        if not hint:
            return ["A CPU is slow. --dry-run --device-memory GIB plans for a GPU."]
        return [
            "A CPU is slow. These options end sooner, with a worse model and a shorter context window:",
            f"  {hint}",
        ]


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


def own_tokens(choices: Choices) -> dict[str, int]:
    """Tokens that the model writes itself, by kind: as many as its rows hold, `own_tokens` of all kinds at most."""
    value = choices.rows.value
    rows = rows_by_kind(value["n"], value["shares"])
    own = {kind: rows[kind] for kind in ("chats", "own_texts") if rows.get(kind)}
    return {kind: min(value["own_tokens"] // len(own), count * value["length"]) for kind, count in own.items()}


def _minutes(
    facts: ModelFacts, options: ExtendOptions, choices: Choices, machine: Machine, rate: Rate, counts: dict[int, int]
) -> Minutes:
    size, measuring, step = facts.size, choices.evaluation.value, choices.step(machine.device)
    calls = forward_calls(size)
    operations = sum(count * step_operations(size, step, length) for length, count in counts.items())
    # rows are joined by extend alone
    batches = _batches(choices, options) if machine.n_gpus == 1 else sum(counts.values())
    train = rate.seconds(operations, batches * step_calls(size, step)) / machine.n_gpus

    def seconds_of(part: Part) -> float:
        return rate.seconds(operations_of(size, part), part.count * calls)

    shares = shares_of(parts_of(eval_plan(facts, choices, options.seed)), machine.n_gpus, seconds_of)
    measure = max(sum(map(seconds_of, share)) for share in shares)
    measure += _ANSWERS[step.device] * len({*measuring["lengths"], *measuring["ruler_lengths"]}) / machine.n_gpus
    write, own = 0.0, own_tokens(choices)
    if own:
        seconds = seconds_a_step(facts, step.device) if machine.rate is None else None
        free_memory()
        if seconds is None:  # on a GPU that is not here, or without a cache that can be timed
            # one token of each text: a multiplication and an addition with each weight
            seconds = rate.seconds(2.0 * size.parameters * AT_ONCE[step.device], calls)
        write = sum(seconds_of_writing(facts, step.device, kind, tokens, seconds) for kind, tokens in own.items())
    export = export_seconds(size, facts.dtype.itemsize, machine.device, rate, machine.memory)
    measurements = 3 if options.untrained else 2
    return Minutes(measure / 60, write / 60, train / 60, export / 60, measurements)


def _batches(choices: Choices, options: ExtendOptions) -> float:
    """Batches that go through the model, each of one row or of several short ones."""
    length, counts = choices.rows.value["length"], row_counts(choices)
    rows = sum(counts.values())
    a_step = batches_a_step(options.rows_per_step, counts.get(length // SHORTER, 0) / rows, SHORTER)
    return rows / options.rows_per_step * a_step
