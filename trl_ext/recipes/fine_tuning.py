"""From a recipe to the trained model: what `rope-patch train` does."""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import AutoTokenizer, TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging
from trl import ModelConfig, get_quantization_config

from rope_patch import describe, load_adapter
from rope_patch.base.empty_folders import without_empty_folders
from rope_patch.base.hub_revision import require_revision
from rope_patch.base.remote_code import load_pretrained
from rope_patch.checkpoints.checked_loading import load_checkpoint
from rope_patch.eval.report import require_writable
from rope_patch.export import PROGRAMS, export
from rope_patch.export.reloading import to_gpu_with_room
from rope_patch.export.writing import unfinished_folders
from rope_patch.model_card import read_runs

from ..engines.device import free_memory
from ..runs.checkpoint import ADAPTER_CONFIG, require_checkpoint, require_no_adapter, require_tokenizer, trusts_code
from ..runs.folder import is_whole, last_checkpoint, only_run, read_run_record, require_same_settings, write_whole
from ..runs.model_files import begun_with, commit_of, model_files, recorded_commit, require_same_model
from ..runs.progress import Progress
from ..trainer.trainer import RopeSFTTrainer
from .adapter_config import adapter_config
from .dataset import digests, read_dataset
from .engine_advice import engine_advice
from .recipe import read_recipe, recipe_and_flags
from .stages import Stage, read_stages, require_fitting_stages
from .stopped import SAME_COMMAND_RESUMES

logger = logging.get_logger(__name__)

RECORD = "recipe.json"
"""The record of a recipe with stages, in its `output_dir`."""


@dataclass(frozen=True)
class Figures:
    """Figures of a training.

    Args:
        steps: optimizer steps.
        tokens: trained on.
        loss: mean of the last tenth of the logged losses, None if none was logged.
        peak_bytes: that PyTorch had allocated on the GPU that held most; None on a CPU.
    """

    steps: int
    tokens: int
    loss: float | None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Trained:
    """The result of a recipe.

    Args:
        folder: the model, or the adapters of a recipe without stages.
        stages: name -> figures of each stage; "" -> figures of a recipe without stages.
    """

    folder: Path
    stages: dict[str, Figures]

    def __str__(self) -> str:
        lines = [f"{self.folder}: {sum(stage.tokens for stage in self.stages.values()):,} tokens"]
        for name, stage in self.stages.items():
            loss = "" if stage.loss is None else f", loss {stage.loss:.3f} at the end"
            lines.append(f"  {name or 'training'}: {stage.steps} steps{loss}")
        return "\n".join(lines)


def train_recipe(recipe: str | Path | Mapping[str, Any], **overrides: Any) -> Trained:
    """Train as a recipe says, and save the model, or its adapters, in `output_dir`.

    A recipe has the keys of `rope-patch train`. With `stages`, a list of mappings, each stage has the recipe's keys,
    its own keys, which win, and `name`, its folder in `output_dir`. It begins from the result of the stage before: its
    weights, or the base model with its adapters, which are trained further. A `rescale` beside `stages` is applied
    once, before the first. The same call resumes an interrupted one, within a stage or between stages. At the end a
    plain checkpoint, in the dtype of the original one, is exported to `output_dir/model`, with `window` and `check` of
    `rope_patch.export` where `export` beside `stages` names them.

    Args:
        recipe: a YAML file, or its keys and values.
        **overrides: keys that win over those of the recipe and of its stages, e.g. output_dir="other".

    Returns:
        The folder of the result, and figures of the training.

    Raises:
        ValueError: the recipe is wrong; model, text and settings do not go together; a stage has a teacher and no
            adapters after the first, or rows beyond its teacher's window; weights in 16 bits are trained in stages;
            `output_dir` has stages of another recipe, model or text; or another process trains there.
        OSError: a file that is not there, or a folder that cannot be written.
    """
    if isinstance(recipe, Mapping):
        return run(read_stages(recipe, **overrides))
    return run(read_stages(read_recipe(Path(recipe)), source=str(recipe), **overrides))


def fine_tune_recipe(arguments: Sequence[str] | None = None) -> None:
    """`train_recipe` from the command line; for a recipe with stages it also prints the result and how to serve it.

    Args:
        arguments: `--config RECIPE.yaml` and flags, which win; None takes those of the process.
    """
    stages = _read(arguments)
    made = run(stages)
    if stages[0].name and PartialState().is_main_process:
        print(f"{made}\nServe it with transformers: {PROGRAMS['transformers'](made.folder, None)}")


def _read(arguments: Sequence[str] | None) -> list[Stage]:
    keys, flags, source = recipe_and_flags(list(sys.argv[1:] if arguments is None else arguments))
    return read_stages(keys, flags, source)


def run(
    stages: list[Stage],
    trainer_class: type[RopeSFTTrainer] | None = None,
    progress: TrainerCallback | None = None,
) -> Trained:
    """Train the stages of `read_stages`.

    Args:
        stages: of a recipe.
        trainer_class: None is `RopeSFTTrainer`.
        progress: shown in place of what Transformers and this package print.
    """
    first, name = stages[0], str(stages[0].model.model_name_or_path)
    # stages have folders of their own within output_dir
    root = first.folder.parent if first.name else first.folder
    record, result = root / RECORD, root / "model"
    begun = [stage for stage in stages if first.name and stage.is_begun]
    if begun:
        require_same_settings(record, _settings(stages, begun), "output_dir")
    recorded = begun_with(record).get("hub_model", {}) if begun else _hub_model_of(first.training)
    config, hub_model = _model(first, recorded or {})
    if Path(name).is_dir() and root.expanduser().resolve() == Path(name).resolve():
        raise ValueError(
            f"output_dir is the folder of model_name_or_path, {root}, which would be overwritten: name another."
        )
    if first.name:
        require_fitting_stages(stages, getattr(config.get_text_config(), "max_position_embeddings", None))
        if (result / "config.json").is_file() and not all(stage.figures.is_file() for stage in stages):
            raise ValueError(f"{result} is there already, and this recipe would export to it: use another output_dir.")
        if begun:
            require_same_model(record, name, model_files(name), "output_dir")
    with without_empty_folders(root):
        require_writable(root)
        # only the first rank writes
        with only_run(root, "output_dir") if first.training.process_index == 0 else nullcontext():
            if not first.name:
                return Trained(root, {"": _train(first, read_dataset(first), hub_model, None, trainer_class, progress)})
            try:
                done = _train_stages(stages, begun, root, hub_model, trainer_class, progress)
                if PartialState().is_main_process:
                    dtype = getattr(config, "dtype", None)
                    _export(stages[-1].folder, result, {"check": False, **first.export}, dtype or "auto")
                PartialState().wait_for_everyone()
            except KeyboardInterrupt as stopped:
                raise KeyboardInterrupt(f"{SAME_COMMAND_RESUMES} {root}.") from stopped
    return Trained(result, done)


def _train_stages(
    stages: list[Stage],
    begun: list[Stage],
    root: Path,
    hub_model: dict[str, Any] | None,
    trainer_class: type[RopeSFTTrainer] | None,
    progress: TrainerCallback | None,
) -> dict[str, Figures]:
    """Train the stages that are not finished yet; name -> figures of all."""
    ranks = PartialState()  # every rank runs this function, and the first one writes
    texts = [read_dataset(stage) for stage in stages]
    hashed: dict[str, str] = {}  # stages mostly read the same text, which may be large
    contents = {f"text of {s.name}": digests(text, hashed) for s, text in zip(stages, texts, strict=True)}
    if begun:
        known = {name: contents[name] for name in (f"text of {stage.name}" for stage in begun)}
        require_same_settings(root / RECORD, known, "output_dir", {name: name for name in known})
    # all have compared with the record before it is written anew
    ranks.wait_for_everyone()
    if ranks.is_main_process:
        files = model_files(str(stages[0].model.model_name_or_path))
        settings = {**_settings(stages, stages), **contents, "model_files": files, "hub_model": hub_model}
        write_whole(root / RECORD, settings)
    done, before = {}, None
    for stage, text in zip(stages, texts, strict=True):
        if not stage.figures.is_file():
            figures = _train(stage, text, hub_model, before, trainer_class, progress)
            free_memory()
            if ranks.is_main_process:
                write_whole(stage.figures, asdict(figures))
            ranks.wait_for_everyone()
        done[stage.name] = Figures(**read_run_record(stage.figures))
        before = stage.folder
    return done


def _export(trained: Path, result: Path, options: dict[str, Any], dtype: Any) -> None:
    if (result / "config.json").is_file():
        logger.warning(f"All stages in {result.parent} are finished: nothing was left to do.")
        return
    for unfinished in unfinished_folders(result):  # of a killed export, as large as the model
        shutil.rmtree(unfinished)
    is_adapter = (trained / ADAPTER_CONFIG).is_file()
    # weights are trained in float32, which would double the checkpoint
    export(trained if is_adapter else to_gpu_with_room(load_checkpoint(trained, dtype=dtype)), result, **options)


def _settings(stages: Sequence[Stage], begun: Sequence[Stage]) -> dict[str, Any]:
    """Settings that a resuming call must not change: the names of stages, and all settings of begun ones."""
    return {"stages": [stage.name for stage in stages], **{f"stage {stage.name}": stage.settings for stage in begun}}


def _train(
    stage: Stage,
    text: Mapping[str, Any],
    hub_model: dict[str, Any] | None,
    before: Path | None,
    trainer_class: type[RopeSFTTrainer] | None,
    progress: TrainerCallback | None,
) -> Figures:
    """Train a stage, which begins from the result in the folder `before`, and save the result in its folder."""
    training = stage.training
    loading = stage.loading if hub_model is None else {**stage.loading, "revision": hub_model["model_commit"]}
    given: dict[str, Any] = {"model": stage.model.model_name_or_path, "peft_config": adapter_config(stage.model)}
    quantized = get_quantization_config(stage.model)
    training.model_init_kwargs = loading
    if before is None:
        given["quantization_config"] = quantized
    elif stage.model.use_peft:
        if quantized is not None:
            loading["quantization_config"] = quantized
        base = load_checkpoint(given["model"], **loading)
        given = {"model": load_adapter(base, before, is_trainable=True)}
        given["processing_class"] = load_pretrained(AutoTokenizer, before)
        training.model_init_kwargs = None  # the model is loaded already
    else:
        given["model"] = str(before)  # weights of the stage before
        training.model_init_kwargs = {**loading, "revision": "main"}  # a folder has no other
    trainer_class = trainer_class or RopeSFTTrainer
    trainer = trainer_class(args=training, train_dataset=text["train"], eval_dataset=text.get("test"), **given)
    trainer.hub_model = hub_model
    if before is not None and stage.model.use_peft:
        trainer.base_revision = loading["revision"]
    for parameter in trainer.model.parameters():
        if stage.name and parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            # TRL makes adapters of quantised models bfloat16, which rounds small steps away
            parameter.data = parameter.data.float()
    if progress is None:
        trainer.accelerator.print(describe(trainer.model))
    else:
        for printing in (ProgressCallback, PrinterCallback):  # they print every log as a dictionary
            trainer.remove_callback(printing)
        trainer.add_callback(progress)
    trainer.add_callback(_ProgressFile())
    newest = last_checkpoint(stage.folder) if stage.name else training.resume_from_checkpoint
    checkpoint, begun = None if newest is None else str(newest), time.time()
    # read before the training, which may remove old checkpoints
    done = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json"))).global_step if checkpoint else None
    if training.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(_how_to_resume(stage, begun)) from stopped
    step = trainer.state.global_step
    if done == step:
        trainer.accelerator.print(
            f"Nothing was left to train: {checkpoint} is of step {step}, and the run ends at step "
            f"{trainer.state.max_steps}."
        )
    peak = None
    if training.device.type == "cuda":
        of_rank = torch.tensor([torch.cuda.max_memory_allocated()], device=training.device)
        peak = int(trainer.accelerator.gather(of_rank).max())
    trainer.save_model()
    if training.push_to_hub:
        trainer.push_to_hub()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tail = losses[-max(1, len(losses) // 10) :]
    return Figures(step, int(trainer._total_train_tokens), sum(tail) / len(tail) if tail else None, peak)


class _ProgressFile(TrainerCallback):
    """Writes where the training stands, for `rope-patch status`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = state.global_step, time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            at = Progress(state.global_step, state.max_steps, float(logs["loss"]), *self.began, time.time())
            at.write(Path(args.output_dir))


def _how_to_resume(stage: Stage, begun: float) -> str:
    """How to resume a stopped run that began at time `begun`; older checkpoints may be of an earlier run."""
    newest = last_checkpoint(stage.folder)
    is_of_this_run = newest is not None and (newest / "trainer_state.json").stat().st_mtime >= begun
    checkpoint = newest if is_of_this_run else stage.training.resume_from_checkpoint
    if checkpoint is None:
        return "No checkpoint was saved: the same command begins anew."
    return f"The same command resumes with --resume-from-checkpoint {checkpoint}, and without it begins anew."


def _hub_model_of(training: Any) -> dict[str, Any]:
    """The model on the hub with which the checkpoint to resume from was begun, {} if there is none."""
    checkpoint = training.resume_from_checkpoint
    if checkpoint is None:
        return {}
    if not is_whole(Path(checkpoint)):
        raise ValueError(
            f"resume_from_checkpoint must be a whole checkpoint such as OUTPUT_DIR/checkpoint-100, got {checkpoint}: "
            "there is no readable trainer_state.json. A run that is killed while it saves leaves a part of one."
        )
    runs = read_runs(checkpoint)
    recorded: dict[str, Any] = runs[-1].get("run", {}).get("hub_model", {}) if runs else {}
    return recorded


def _model(stage: Stage, begun: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The config of the model, and for one on the hub its name, revision and commit, None for a folder.

    A resumed run keeps the commit of `begun`, the model with which it began: the branch may have moved since.
    """
    model, training = stage.model, stage.training
    name, revision = str(model.model_name_or_path), stage.loading["revision"]
    commit = recorded_commit(begun, name, revision)
    config = require_model(model, commit or revision, trusts_code(training))
    commits: list[str | None] = broadcast_object_list([commit or commit_of(name, revision)])  # of the first rank
    commit = commits[0]
    if commit is None:
        return config, None
    if begun.get("model") == name and begun["model_commit"] != commit:
        raise ValueError(
            f"model_revision must be {begun['model_revision']}, with which {training.resume_from_checkpoint} was begun "
            f"as commit {begun['model_commit']} of {name}, got {revision}, which is commit {commit}. Give the former, "
            "or start a new run, in another output_dir and without resume_from_checkpoint."
        )
    return config, {"model": name, "model_revision": revision, "model_commit": commit}


def plan_recipe(
    arguments: Sequence[str], n_gpus: Sequence[int], gpus_per_row: int | None = None, available: int | None = None
) -> str:
    """The memory that each engine needs for each stage of a recipe; nothing is loaded or written.

    Args:
        arguments: as of `fine_tune_recipe`.
        n_gpus: numbers of GPUs to look at, rising.
        gpus_per_row: GPUs that share a row; None for all.
        available: the most GPUs that may be advised; None for all that are looked at.

    Raises:
        ValueError: the recipe is wrong, or of weights in 8 bits, which are not counted.
        OSError: a file that is not there.
    """
    on_cpu = [] if torch.cuda.is_available() else ["--use_cpu", "true"]  # where bf16 would be refused
    plans = []
    for stage in _read([*arguments, *on_cpu]):
        training, model, loading = stage.training, stage.model, stage.loading
        config = require_model(model, loading["revision"], trusts_code(training))
        if model.load_in_8bit:
            raise ValueError("--dry-run counts weights of 4, 16 and 32 bits alone: leave load_in_8bit out.")
        plan = engine_advice(
            config,
            training,
            adapter_config(model),
            loading["dtype"],
            n_gpus,
            attention=loading["attn_implementation"],
            gpus_per_row=gpus_per_row,
            in_4_bits=model.load_in_4bit,
            available=available,
        )
        plans.append(f"{stage.name}:\n{plan}" if stage.name else plan)
    return "\n\n".join(plans)


def require_model(model: ModelConfig, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of the model at a revision on the hub, by default that of the recipe.

    Raises:
        ValueError: it is no model, or options of adapters have no effect.
    """
    if model.model_name_or_path is None:
        raise ValueError("model_name_or_path must name the model, a hub id or the folder of a checkpoint.")
    require_no_adapter(model.model_name_or_path, "model_name_or_path")
    if model.model_revision != "main":  # TRL's default
        require_revision(model.model_revision, model.model_name_or_path, "model_revision")
    config = require_checkpoint(
        model.model_name_or_path, "model_name_or_path", revision or model.model_revision, trust_remote_code
    )
    require_tokenizer(model.model_name_or_path, "model_name_or_path")
    if model.use_peft:
        return config
    of_peft = ("use_rslora", "use_dora")
    adapter_fields = [f for f in fields(ModelConfig) if f.name.startswith("lora_") or f.name in of_peft]
    changed = [f.name for f in adapter_fields if getattr(model, f.name) != f.default]
    if changed:
        raise ValueError(f"{' and '.join(changed)} would have no effect: add use_peft: true, which trains adapters.")
    return config
