"""`trl_ext.extend`: plan, measure, train, export and measure again, resuming an interrupted run of the folder."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from rope_patch import patch_model
from rope_patch.base.environment import installed_versions
from rope_patch.base.registry import unknown
from rope_patch.checkpoints.checked_loading import load_checkpoint
from rope_patch.eval.report import require_report
from rope_patch.eval.results.cache import files_hash
from rope_patch.export import PROGRAMS, export, require_served
from rope_patch.export.gguf import find_converter, require_known_tokenizer, require_runs
from rope_patch.export.writing import unfinished_folders
from rope_patch.methods import resolve_view

from ..engines.device import choose_device, free_memory, require_one_process
from ..recipes.stages import read_stages
from ..rows.turns import SampledTurns
from ..runs.checkpoint import ADAPTER_CONFIG
from ..runs.folder import last_checkpoint, only_run, record_settings, require_same_settings
from ..runs.model_files import begun_with, model_files, recorded_commit, require_same_model
from ..trainer.window_check import check_window
from . import measuring, rows, texts, training
from .choices import Choices, choose
from .facts import ModelFacts
from .machine import Machine
from .messages import MessageFile, others_quiet
from .options import ExtendOptions
from .plan import ExtensionPlan
from .stages import Stages

_RECORD = "extend.json"


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
        answers: a question far back in a long text, with what the model wrote before and after.
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
        return "\n\n".join("\n".join(part) for part in (self.table, self.verdict, self.answers, made) if part)


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

    Measures the model, writes training rows, trains, exports and measures again. Choices follow measurements
    (docs/choosing.md) and the memory of this machine, and are printed with their reasons. Each stage is kept in
    `output`: the same call resumes an interrupted one, in training from the last checkpoint.

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
    given: dict[str, Any] = {name: _strings(value) if name == "held_out" else value for name, value in choices.items()}
    options = ExtendOptions(
        model=str(model),
        to=to,
        data=_strings(data),
        output=str(output),
        targets=_strings(targets),
        **given,
    )
    with others_quiet() as messages:
        return _Run(options, tell, messages).go(dry_run)


class _Run:
    """One call of `extend`."""

    def __init__(self, options: ExtendOptions, tell: Callable[[str], None], messages: MessageFile) -> None:
        require_one_process("extend")
        options = replace(options, device=choose_device(options.device, torch.cuda.is_available()))
        self.options, self.tell, self.messages = options, tell, messages
        self.stages = Stages(options.folder)
        self._require_folder()
        _require_targets(options)
        self.facts = ModelFacts.of(
            options.model,
            options.model_revision,
            recorded_commit(begun_with(self.record), options.model, options.model_revision),
        )
        backend = getattr(self.facts.tokenizer, "backend_tokenizer", None)
        if "llama.cpp" in options.targets and backend is not None:
            require_known_tokenizer(self.facts.config.model_type, backend.to_str())
        if options.to <= self.facts.window:
            raise ValueError(
                f"--to must be beyond the window of {self.facts.window} positions that {options.model} was trained on, "
                f"got {options.to}: it reads that many already."
            )
        self.machine = Machine.of(str(options.device))
        self.settings = {
            **options.recorded(),
            "contents": [files_hash(file) for file in (*options.data, *options.held_out) if Path(file).is_file()],
        }
        require_same_settings(
            self.record,
            self.settings,
            "--output, or the options that it was begun with",
            {"contents": "contents of --data or --held-out"},
        )
        self.model_files = model_files(options.model)
        require_same_model(self.record, options.model, self.model_files, "--output")
        self.choices = self._choices()
        self.texts = texts.read(
            self.facts,
            options,
            row_length=self.choices.rows.value["length"],
            n_rows=self.choices.evaluation.value["n_rows"],
        )
        self.eval_plan = measuring.eval_plan(self.facts, options.to, self.choices, options.seed)
        self._check()

    @property
    def record(self) -> Path:
        """The record of the run in its folder."""
        return self.options.folder / _RECORD

    def go(self, dry_run: bool) -> Extended | ExtensionPlan:
        """Run the remaining stages."""
        plan = ExtensionPlan.of(self.facts, self.options, self.choices, self.machine, self.texts.source)
        if dry_run:
            return plan
        require_report(self.options.folder / "report")
        log = self.options.folder / "log.txt"
        resumes = self.record.is_file()
        if not resumes:
            self.tell(f"{plan}\n\nWhat other packages print meanwhile goes to {log}.")
            recorded = {
                "model_files": self.model_files,
                "model_commit": self.facts.commit,
                "choices": self.choices.to_dict(),
            }
            record_settings(self.record, {**self.settings, **recorded}, "--output")
        with only_run(self.record, "--output"):
            if resumes:
                self._tell_resumed()
            self.messages.write_to(log)
            return self._stages()

    def _stages(self) -> Extended:
        root, options, run = self.options.folder, self.options, self.stages.run
        model, trained = root / "model", root / "training"
        before = run("before", lambda: self._measure("Measuring the model as it is", measuring.BEFORE, None))
        made = run("rows", lambda: self._rows(root / "rows.jsonl"))
        run("train", lambda: self._train(trained, made["rows"]))
        self._require_exported("model", model, trained)
        served = {"transformers": run("model", lambda: self._export(trained, model, "transformers"))}
        after = run("after", lambda: self._measure("Measuring it again, as it is served", measuring.AFTER, model))
        for target in options.targets:
            if target != "transformers":
                folder = root / f"model-{target}"
                self._require_exported(f"model-{target}", folder, model)
                served[target] = run(f"model-{target}", lambda f=folder, t=target: self._export(model, f, t))  # type: ignore[misc]
        results = measuring.together(before, after)
        settings = {"model": self.facts.full_name, "data": ", ".join(options.data), "measured on": self.texts.source}
        settings |= installed_versions("trl")
        page = measuring.report(results, root / "report", self.facts.name, self.eval_plan, self.choices, settings)
        window = self.facts.window
        return Extended(
            folder=root,
            model=model,
            commands={target: one["command"] for target, one in served.items()},
            report=page,
            table=measuring.table(results, window),
            verdict=measuring.verdict(results, window),
            answers=measuring.answers(results),
        )

    def _measure(self, title: str, label: str, model: Path | None) -> dict[str, Any]:
        self.tell(f"\n{title}.")
        cache, begin = self.options.folder / "cache", time.perf_counter()
        device = str(self.options.device)
        results = measuring.measure(label, model, self.facts, self.eval_plan, self.texts, device, cache)
        free_memory()
        if label == measuring.BEFORE:  # figures of both are printed at the end
            for line in measuring.lines(results, self.facts.window):
                self.tell(line)
            minutes = (time.perf_counter() - begin) / 60
            self.tell(f"  That took {minutes:.1f} minutes, and measuring again at the end takes about as long.")
        return results

    def _rows(self, file: Path) -> dict[str, Any]:
        self.tell("\nMaking training rows.")
        made = rows.make(self.facts, self.options, self.choices, self.texts.train, file)
        for line in made["contents"]:
            self.tell(f"  {line}")
        return made

    def _train(self, folder: Path, n_rows: int) -> dict[str, Any]:
        begun = last_checkpoint(folder)
        self.tell(f"\nTraining{f', from {begun.name} on' if begun else ''}.")
        made = training.train(self.facts, self.options, self.choices, n_rows, self.tell)
        self.tell(f"  {made['steps']} steps, {made['tokens']:,} tokens, loss {made['loss']:.3f} at the end.")
        return made

    def _require_exported(self, stage: str, folder: Path, source: Path) -> None:
        """Export a model again if its folder was removed since an earlier run.

        Raises:
            ValueError: the source of the export was removed too.
        """
        if not self.stages.is_done(stage) or (folder / "config.json").is_file():
            return
        if not (source / "config.json").is_file() and not (source / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"{folder} is no longer there, nor is {source}, from which it would be exported again: put one of them "
                "back, or name a new --output."
            )
        self.stages.forget(stage)

    def _export(self, source: Path, folder: Path, target: str) -> dict[str, Any]:
        self.tell(f"\nExporting for {target}.")
        # a folder of an unfinished stage is left by a run that was stopped
        if folder.is_dir():
            shutil.rmtree(folder)
        for unfinished in unfinished_folders(folder):  # as large as the model
            shutil.rmtree(unfinished)
        converter = self.options.converter if target == "llama.cpp" else None
        # whole weights are trained in float32
        is_adapter = (source / ADAPTER_CONFIG).is_file()
        exported = source if is_adapter else load_checkpoint(source, dtype=self.facts.dtype)
        made = export(exported, folder, target=target, converter=converter, window=self.options.to)
        return {"command": made.command, "largest_difference": made.largest_difference}

    def _require_folder(self) -> None:
        folder = self.options.folder
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not self.record.is_file()):
            raise ValueError(f"--output {folder} holds other files than those of an extension: name a new folder.")

    def _choices(self) -> Choices:
        """The choices of the run in the folder, or new ones."""
        if not self.record.is_file():
            return choose(self.facts, self.options, self.machine)
        choices = Choices.from_dict(begun_with(self.record)["choices"])
        rescaling = choices.rescaling.value
        twin = patch_model(self.facts.twin(), rescaling["rescale"], **rescaling["rescale_args"])
        for target in self.options.targets:  # which may be others than those of the first call
            require_served(target, twin)
        return choices

    def _check(self) -> None:
        """Raise now what training or measuring would raise later."""
        rescaling, view = self.choices.rescaling.value, self.choices.view.value
        (stage,) = read_stages(training.recipe(self.facts, self.options, self.choices, 1))
        if stage.model.use_peft:
            import peft  # noqa: F401  # an error names the missing package here
        length = self.choices.rows.value["length"]
        twin = patch_model(self.facts.twin(), rescaling["rescale"], **rescaling["rescale_args"])
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
        stages = {
            "before": "measuring the model as it is",
            "rows": "making training rows",
            "train": "training",
            "model": "exporting",
            "after": "measuring it again",
            **{f"model-{t}": f"exporting for {t}" for t in self.options.targets if t != "transformers"},
        }
        done = [words for name, words in stages.items() if self.stages.is_done(name)]
        left = [words for name, words in stages.items() if not self.stages.is_done(name)]
        if left:
            self.tell(
                f"This resumes what was begun in {self.options.folder}. Done, and not done again: "
                f"{', '.join(done) or 'nothing'}. Next: {left[0]}."
            )
        else:
            self.tell(f"All stages in {self.options.folder} are finished. This is the result:")


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
