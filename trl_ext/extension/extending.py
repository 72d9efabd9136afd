"""`trl_ext.extend`: plan, measure, train, export and measure again, resuming an interrupted run of the folder."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import get_reporting_integration_callbacks

from rope_patch import patch_model
from rope_patch.base.environment import installed_versions
from rope_patch.base.registry import unknown
from rope_patch.eval import regressions, verdict
from rope_patch.eval.report import require_report
from rope_patch.export import PROGRAMS, export, require_served
from rope_patch.export.gguf import find_converter, require_known_tokenizer, require_runs
from rope_patch.export.writing import unfinished_folders
from rope_patch.methods import resolve_view

from ..engines.device import choose_device, free_memory, require_one_process
from ..recipes.launching import Launch
from ..rows.turns import SampledTurns
from ..runs.folder import last_checkpoint, only_run, read_run_record, require_same_settings, write_whole
from ..runs.model_files import begun_with, model_files, recorded_commit, require_same_model
from ..trainer.window_check import check_window
from . import measuring, measuring_parts, rows, texts, training
from .choices import Choices, choose
from .facts import ModelFacts
from .fitting import command_of, engine_of, fits
from .machine import GIB, Machine
from .messages import MessageFile, others_quiet
from .options import ExtendOptions
from .plan import ExtensionPlan
from .steps import RECORD, RESULT, is_trained, stage_file, steps_done

_LOG = "log.txt"


@dataclass(frozen=True)
class Extended:
    """The result of `extend`. `print` it.

    Args:
        folder: of all files.
        model: the extended checkpoint, plain Transformers.
        commands: target -> the command that serves it.
        report: a page with every figure.
        table: before and after, lines of text.
        verdict: what was won and lost, in sentences.
        answers: a question about a number in a long text, with what the model wrote before and after.
    """

    folder: Path
    model: Path
    commands: dict[str, str]
    report: Path
    table: list[str]
    verdict: list[str]
    answers: list[str]

    def __str__(self) -> str:
        serve = [f"Serve it with {target}: {command}" for target, command in self.commands.items()]
        made = [f"Model:  {self.model}", f"Report: {self.report}", *serve]
        return "\n\n".join("\n".join(part) for part in (self.verdict, self.table, self.answers, made) if part)


def extend(
    model: str | Path,
    *,
    to: int,
    data: str | Path | Sequence[str | Path],
    output: str | Path,
    targets: Sequence[str] = (),
    dry_run: bool = False,
    tell: Callable[[str], None] = print,
    **choices: Any,
) -> Extended | ExtensionPlan:
    """Extend the context window of a model, so that it keeps what it could do.

    Measures the model, writes training rows, trains and exports by a recipe, and measures again. Choices follow
    measurements (docs/choosing.md) and the memory of this machine, and are printed with their reasons. The result of
    each step is kept in `output`: the same call resumes an interrupted one, in training from the last checkpoint.

    Args:
        model: hub id, or folder of a checkpoint.
        to: target window, in positions.
        data: files of documents, .jsonl(.xz, .gz) with `text`, or text files.
        output: folder, new or of the same run.
        targets: programs to export for beside Transformers, by name in `rope_patch.export.PROGRAMS`.
        dry_run: whether to return the plan, and write nothing.
        tell: called with each line of output; progress bars are shown besides.
        **choices: fields of `trl_ext.extension.options.ExtendOptions`, which win over the automatic choices.

    Returns:
        The result; with `dry_run` the plan. `print` either.

    Raises:
        ValueError: the options do not fit the model or machine, or another process uses `output`; raised before any
            work.
        FileNotFoundError: there is no such data file, or no converter for llama.cpp.
        ImportError: that converter does not start, or a package is missing.
    """
    names = {field.name for field in fields(ExtendOptions)}
    for name in choices:
        if name not in names:
            raise unknown("option", name, names, of="extend")
    several = {"held_out", "report_to"}
    given: dict[str, Any] = {name: _strings(value) if name in several else value for name, value in choices.items()}
    options = ExtendOptions(
        model=str(model),
        to=to,
        data=_strings(data),
        output=str(output),
        targets=_strings(targets),
        **given,
    )
    if options.device_memory is not None and not dry_run:
        raise ValueError("--device-memory plans for a GPU that is not here, and runs nothing: it needs --dry-run.")
    with others_quiet() as messages:
        return _Run(options, tell, messages).go(dry_run)


class _Run:
    """One call of `extend`."""

    def __init__(self, options: ExtendOptions, tell: Callable[[str], None], messages: MessageFile) -> None:
        require_one_process("extend")
        elsewhere = options.device_memory is not None
        device = "cuda" if elsewhere else choose_device(options.device, torch.cuda.is_available())
        options = replace(options, device=device)
        self.options, self.tell, self.messages = options, tell, messages
        folder, self.record = options.folder, options.folder / RECORD
        begun = begun_with(self.record)
        # a run that was killed before it wrote its record has left its log and empty folders
        others = (file for file in folder.rglob("*") if file.is_file() and file.name != _LOG)
        if folder.is_file() or (not begun and any(others)):
            raise ValueError(f"--output {folder} holds other files than those of an extension: name a new folder.")
        _require_targets(options)
        commit = recorded_commit(begun, options.model, options.model_revision)
        self.facts = ModelFacts.of(options.model, options.model_revision, commit)
        backend = getattr(self.facts.tokenizer, "backend_tokenizer", None)
        if "llama.cpp" in options.targets and backend is not None:
            require_known_tokenizer(self.facts.config.model_type, backend.to_str())
        if options.to <= self.facts.window:
            raise ValueError(
                f"--to must be longer than the context window of {options.model}, {self.facts.window} positions, got "
                f"{options.to}."
            )
        if options.device_memory is not None:
            self.machine = Machine.elsewhere(options.device_memory)
        else:
            self.machine = Machine.of(device)
        self.settings = {
            **options.recorded(),
            "contents": texts.contents((*options.data, *options.held_out)),
        }
        hashed = {"contents": "contents of --data or --held-out"}
        require_same_settings(self.record, self.settings, "--output, or the options that it was begun with", hashed)
        self.model_files = model_files(options.model)
        require_same_model(self.record, options.model, self.model_files, "--output")
        # a resumed run keeps its choices: memory that is free now may be another
        if begun:
            self.choices = Choices.from_dict(begun["choices"])
        else:
            self.choices = choose(self.facts, options, self.machine)
        self._choose_engine(begun)
        trained, measured = self.choices.rows.value, self.choices.evaluation.value
        self.texts = texts.read(
            self.facts,
            options,
            row_length=trained["length"],
            measured_length=measured["row_length"],
            n_rows=measured["n_rows"],
        )
        self.eval_plan = measuring.eval_plan(self.facts, self.choices, options.seed)
        self._check()

    def _choose_engine(self, begun: dict[str, Any]) -> None:
        """Set the GPUs that train and their engine: of the options, of the record, or all GPUs if one is too small."""
        options, n_gpus, there = self.options, self.options.devices, torch.cuda.device_count()
        if options.device == "cuda" and options.device_memory is None:
            if n_gpus is not None and n_gpus > there:
                raise ValueError(f"--devices must be at most the {there} GPUs that torch sees, got {n_gpus}.")
            if n_gpus is None and begun:
                n_gpus = min(begun["n_gpus"], there)
            elif n_gpus is None:
                is_enough = options.accelerate_config is None and fits(self.facts, self.choices, self.machine, None)
                n_gpus = 1 if is_enough else there
        n_gpus = n_gpus or begun.get("n_gpus", 1)
        if n_gpus == 1 and options.accelerate_config is not None:
            raise ValueError("--accelerate-config is for several GPUs, and one would train: give --devices.")
        kept = begun.get("engine") if n_gpus > 1 else None
        self.machine = replace(self.machine, n_gpus=n_gpus)
        self.options = replace(options, accelerate_config=options.accelerate_config or kept)
        self.engine = engine_of(self.facts, self.options, self.choices, self.machine)
        if self.engine is not None:
            launch, _ = Launch.take(command_of(self.options, self.engine))  # raises if the rows cannot be divided
            if launch is not None and options.device_memory is None:
                launch.settings()  # raises if DeepSpeed is missing
        before, now = begun.get("engine"), self._config
        trained = None if is_trained(options.folder) else last_checkpoint(self.options.folder / "training")
        # a checkpoint of DDP is as one of a single GPU
        if trained is not None and (before or "ddp") != (now or "ddp"):
            raise ValueError(
                f"{trained} is of {before or 'one GPU'}, and {now or 'one GPU'} cannot go on from it: give the same "
                f"--accelerate-config, with any --devices, or remove {trained.parent}, to train from the beginning."
            )

    @property
    def _config(self) -> str | None:
        return None if self.engine is None else self.engine.config

    def go(self, dry_run: bool) -> Extended | ExtensionPlan:
        """Run the remaining steps."""
        resumes, log = self.record.is_file(), self.options.folder / _LOG
        if dry_run or not resumes:
            plan = ExtensionPlan.of(self.facts, self.options, self.choices, self.machine, self.texts.source)
        if dry_run:
            return plan
        if not resumes and not plan.fits:
            raise ValueError(f"{plan.misfit} {'; '.join(plan.remedies)}. --dry-run prints the whole plan.")
        require_report(self.options.folder / "report")  # it is written last, after hours
        if not resumes:
            self.tell(f"{plan}\n\nMessages of other packages go to {log}.")
            self.options.folder.mkdir(parents=True, exist_ok=True)
        # the log is locked: the record is replaced when it is written, and the recipe locks the folder
        with only_run(log, "--output"):
            if resumes:
                self._tell_resumed()
            kept = {
                "model_files": self.model_files,
                "model_commit": self.facts.commit,
                "choices": self.choices.to_dict(),
                "n_gpus": self.machine.n_gpus,
                "engine": self._config,
            }
            write_whole(self.record, {**self.settings, **kept})
            self.messages.write_to(log)
            return self._run()

    def _run(self) -> Extended:
        root, options, window = self.options.folder, self.options, self.facts.window
        facts, scaling = self.facts, self.choices.rescaling.value
        measured = {measuring.BEFORE: self._measured("Measuring the model as it is", measuring.BEFORE, facts.load)}
        if options.untrained:
            title = "Measuring it under the RoPE scaling, untrained"
            measured[measuring.UNTRAINED] = self._measured(
                title,
                measuring.UNTRAINED,
                partial(facts.load, rescaling=scaling),
            )
        made = self._once("rows", lambda: self._rows(root / "rows.jsonl"))
        if not is_trained(root):
            self._train(made["rows"])
        measured[measuring.AFTER] = self._measured(
            "Measuring it again, as it is served",
            measuring.AFTER,
            partial(measuring.load_plain, root / "model"),
        )
        for target in self._other_targets():
            if not (root / f"model-{target}/config.json").is_file():
                self._export(target)
        results = measuring.together(measured)
        settings = {"model": self.facts.full_name, "data": ", ".join(options.data), "measured on": self.texts.source}
        settings |= installed_versions("trl")
        page = measuring.report(results, root / "report", facts, options.to, self.choices, settings)
        done = Extended(
            folder=root,
            model=root / "model",
            commands={
                "transformers": PROGRAMS["transformers"](root / "model", options.to),
                **{target: PROGRAMS[target](root / f"model-{target}", options.to) for target in self._other_targets()},
            },
            report=page,
            table=measuring.table(results, window),
            verdict=verdict(regressions(results, window=window)),
            answers=measuring.answers(results),
        )
        if not (root / RESULT).is_file():
            measuring.log_verdict(done.verdict, options.report_to, root / "training")
        (root / RESULT).write_text(f"{done}\n", encoding="utf-8")
        return done

    def _other_targets(self) -> list[str]:
        return [target for target in self.options.targets if target != "transformers"]

    def _once(self, step: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures of a step, from its file or else from `make()`, whose return is written to it."""
        file = stage_file(self.options.folder, step)
        if not file.is_file():
            figures = make()
            file.parent.mkdir(exist_ok=True)
            write_whole(file, figures)
        return read_run_record(file)

    def _measured(self, title: str, label: str, load: Callable[[torch.dtype], Any]) -> dict[str, Any]:
        return self._once(label, lambda: self._measure(title, label, load))

    def _measure(self, title: str, label: str, load: Callable[[torch.dtype], Any]) -> dict[str, Any]:
        self.tell(f"\n{title}.")
        cache, begin = self.options.folder / "cache", time.perf_counter()
        device = str(self.options.device)
        n_gpus = self.machine.n_gpus
        if n_gpus > 1:
            cost = partial(measuring_parts.operations_of, self.facts.size)
            shares = measuring_parts.shares_of(measuring_parts.parts_of(self.eval_plan), n_gpus, cost)
            measuring_parts.measure_parts(label, load, self.facts, shares, self.texts, device, cache)
        results = measuring.measure(label, load, self.facts, self.eval_plan, self.texts, device, cache)
        # of the model, so that the next step has it
        free_memory()
        if label == measuring.BEFORE:  # figures of both are printed at the end
            for line in measuring.table(measuring.together({label: results}), self.facts.window):
                self.tell(f"  {line}")
            minutes = (time.perf_counter() - begin) / 60
            self.tell(f"  That took {minutes:.1f} minutes. Each measurement takes about as long.")
        return results

    def _rows(self, file: Path) -> dict[str, Any]:
        self.tell("\nMaking training rows.")
        made = rows.make(self.facts, self.options, self.choices, self.texts.train, file)
        for line in made["contents"]:
            self.tell(f"  {line}")
        return made

    def _train(self, n_rows: int) -> None:
        checkpoint = last_checkpoint(self.options.folder / "training")
        self.tell(f"\nTraining{f' from {checkpoint.name} on' if checkpoint else ''}, and exporting the result.")
        keys = training.recipe(self.facts, self.options, self.choices, n_rows)
        command = None if self.engine is None else command_of(self.options, self.engine)
        figures = training.train(keys, self.options, n_rows, self.tell, command)
        peak = "" if figures.peak_bytes is None else f", {figures.peak_bytes / GIB:.1f} GiB at the peak"
        self.tell(f"  {figures.steps} steps, {figures.tokens:,} tokens, loss {figures.loss:.3f} at the end{peak}.")

    def _export(self, target: str) -> None:
        self.tell(f"\nExporting for {target}.")
        folder = self.options.folder / f"model-{target}"
        for unfinished in unfinished_folders(folder):  # of a killed export, as large as the model
            shutil.rmtree(unfinished)
        model, converter = self.options.folder / "model", self.options.converter if target == "llama.cpp" else None
        export(model, folder, target=target, converter=converter, window=self.options.to)

    def _check(self) -> None:
        """Raise now what training or measuring would raise later."""
        rescaling, view = self.choices.rescaling.value, self.choices.view.value
        stage = training.stage_of(training.recipe(self.facts, self.options, self.choices, 1))  # of one row
        if stage.model.use_peft:
            import peft  # noqa: F401  # an error names the missing package here
        if stage.model.load_in_4bit:
            import bitsandbytes  # noqa: F401
        for callback in get_reporting_integration_callbacks(list(self.options.report_to)):
            callback()  # raises where its package is missing
        length = self.choices.rows.value["length"]
        twin = patch_model(self.facts.twin(), rescaling["rescale"], **rescaling["rescale_args"])
        for target in self.options.targets:  # a resumed run may name others
            require_served(target, twin)
        checked = resolve_view(view["view"], view["view_args"])
        checked.check_run(stage.training)
        checked.check_length(length)
        check_window(twin, checked, length, tell=False)
        if "chats" in self.choices.rows.value["shares"]:
            SampledTurns.of(self.facts.tokenizer, (self.facts.tokenizer.eos_token_id,))
        rows.check(self.facts, self.choices, self.texts.train)
        try:
            self.eval_plan.check(self.facts.tokenizer, self.texts.held_out)
        except ValueError as error:
            raise ValueError(f"--lengths {' '.join(map(str, self.eval_plan.lengths))}: {error}") from error

    def _tell_resumed(self) -> None:
        root = self.options.folder
        steps = steps_done(root, untrained=self.options.untrained, targets=self._other_targets())
        left = [step for step, is_done in steps.items() if not is_done]
        if left:
            done = ", ".join(step for step, is_done in steps.items() if is_done) or "nothing"
            self.tell(f"Resuming the run in {root}. Finished: {done}. Next: {left[0]}.")
        else:
            self.tell(f"The run in {root} is finished. This is the result:")


def _require_targets(options: ExtendOptions) -> None:
    for target in options.targets:
        if target not in PROGRAMS:
            raise unknown("--target", target, PROGRAMS)
    if "llama.cpp" in options.targets:
        require_runs(find_converter(options.converter))
    elif options.converter is not None:
        raise ValueError("--converter is llama.cpp's: it needs --target llama.cpp.")


def _strings(given: Any) -> tuple[str, ...]:
    """One name or several, as strings."""
    return (str(given),) if isinstance(given, str | Path) else tuple(map(str, given))
