"""From a recipe of a fine-tuning to the trained model: what `rope-patch train` does."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import load_dataset
from transformers import AutoConfig, TrainerState, set_seed
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_quantization_config,
)

from rope_patch import describe
from rope_patch.base.empty_folders import without_empty_folders
from rope_patch.base.hub_revision import require_revision
from rope_patch.eval.report import require_writable
from rope_patch.model_card import read_runs

from ..config import RopeSFTConfig
from ..data.data_files import READ_ERRORS, require_utf8, unreadable
from ..runs.checkpoint import require_checkpoint, require_no_adapter, require_tokenizer, trusts_code
from ..runs.folder import is_whole, last_checkpoint, only_run
from ..runs.model_files import commit_of, recorded_commit
from ..trainer.trainer import RopeSFTTrainer
from .adapter_config import adapter_config
from .engine_advice import engine_advice
from .recipe import RecipeParser, leave_precision_to_recipe

FIELDS = (ScriptArguments, RopeSFTConfig, ModelConfig, DatasetMixtureConfig)
"""Whose fields are keys of a recipe and flags of the command line."""


def fine_tune_recipe(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune as a recipe says, and save the model, or its adapters, in `output_dir`.

    Args:
        arguments: `--config RECIPE.yaml` and flags, which win; None takes those of the process.

    Raises:
        ValueError: the recipe is wrong, model, text and settings do not go together, the checkpoint to go on from is of
            another commit of the model, or another process trains into `output_dir`.
        OSError: a file that is not there, or a folder that cannot be written.
    """
    leave_precision_to_recipe()
    script, training, model, data = _parsed(arguments)
    if training.resume_from_checkpoint is not None and not Path(training.resume_from_checkpoint).is_dir():
        raise ValueError(
            "resume_from_checkpoint must be a folder such as OUTPUT_DIR/checkpoint-100, got "
            f"{training.resume_from_checkpoint}: there is no such folder."
        )
    if training.resume_from_checkpoint is not None and not is_whole(Path(training.resume_from_checkpoint)):
        raise ValueError(
            f"resume_from_checkpoint must be a whole checkpoint, and {training.resume_from_checkpoint} has no readable "
            "trainer_state.json, as a run that is killed while it saves leaves it: name an earlier one."
        )
    hub_model = _hub_model(training, model)
    require_other_folder(training.output_dir, model)
    folder = Path(str(training.output_dir))
    with without_empty_folders(folder):
        require_writable(folder)
        # of several ranks the first writes
        with only_run(folder, "output_dir") if training.process_index == 0 else nullcontext():
            _fine_tune(script, training, model, data, hub_model)


def _fine_tune(script: Any, training: Any, model: Any, data: Any, hub_model: dict[str, Any] | None) -> None:
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
        **({} if hub_model is None else {"revision": hub_model["model_commit"]}),
    }
    set_seed(training.seed)  # what test_split_size holds out is drawn: alike on all ranks, and when a run goes on
    dataset = _splits(script, data)
    evaluates = training.eval_strategy != "no"
    if script.dataset_train_split not in dataset:
        raise ValueError(
            f"dataset_train_split must be one of {', '.join(dataset)}, the splits of the text, got "
            f"{script.dataset_train_split!r}."
        )
    if evaluates and script.dataset_test_split not in dataset:
        hold_out = "test_split_size to hold a part out, or " if data.datasets else ""
        raise ValueError(
            f"eval_strategy needs a split {script.dataset_test_split!r} and the text has {', '.join(dataset)}: set "
            f"{hold_out}dataset_test_split."
        )
    trainer = RopeSFTTrainer(
        model=model.model_name_or_path,
        args=training,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset[script.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model),
        peft_config=adapter_config(model),
    )
    trainer.hub_model = hub_model
    trainer.accelerator.print(describe(trainer.model))
    begun = time.time()
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(_how_to_go_on(training, begun)) from stopped
    checkpoint, step = training.resume_from_checkpoint, trainer.state.global_step
    if checkpoint and TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json"))).global_step == step:
        trainer.accelerator.print(
            f"Nothing was left to train: {checkpoint} is of step {step}, and the run ends at step "
            f"{trainer.state.max_steps}."
        )
    trainer.save_model()
    if training.push_to_hub:
        trainer.push_to_hub()


def _require_no_evaluation(training: RopeSFTConfig, data: DatasetMixtureConfig) -> None:
    """Raise ValueError for a field that is of evaluations alone, of which a run with `eval_strategy` "no" has none."""
    if training.eval_strategy != "no":
        return
    of_evaluation = ("eval_steps", "eval_delay", "eval_on_start", "eval_packing", "eval_accumulation_steps")
    default = {field.name: field.default for field in fields(training)}
    without_effect = [name for name in of_evaluation if getattr(training, name) != default[name]]
    if training.load_best_model_at_end:
        without_effect.append("load_best_model_at_end")
    if data.test_split_size:
        without_effect.append("test_split_size")
    if without_effect:
        raise ValueError(
            f"{' and '.join(without_effect)} would have no effect: add eval_strategy: steps or epoch, without which a "
            "run is not evaluated."
        )


def _how_to_go_on(training: RopeSFTConfig, begun: float) -> str:
    """What a run that was stopped has left, which began at `begun`; an earlier run may have left checkpoints there."""
    newest = last_checkpoint(Path(str(training.output_dir)))
    is_of_this_run = newest is not None and (newest / "trainer_state.json").stat().st_mtime >= begun
    checkpoint = newest if is_of_this_run else training.resume_from_checkpoint
    if checkpoint is None:
        return "No checkpoint was saved: the same command begins anew."
    return f"The same command goes on with --resume_from_checkpoint {checkpoint}, and without it begins anew."


def _hub_model(training: RopeSFTConfig, model: ModelConfig) -> dict[str, Any] | None:
    """What is asked for of a model on the hub, and the commit that it is; None of a folder.

    A checkpoint goes on with the commit that it was begun with: its branch may have moved since.
    """
    loading: Any = training.model_init_kwargs or {}  # parsed from JSON by now
    name, revision = str(model.model_name_or_path), loading.get("revision", model.model_revision)
    runs = read_runs(training.resume_from_checkpoint or "")
    begun = runs[-1].get("run", {}).get("hub_model", {}) if runs else {}
    commit = recorded_commit(begun, name, revision)
    require_model(model, commit or revision, trusts_code(training))
    commits: list[str | None] = broadcast_object_list([commit or commit_of(name, revision)])  # of the first rank
    commit = commits[0]
    if commit is None:
        return None
    if begun.get("model") == name and begun["model_commit"] != commit:
        raise ValueError(
            f"model_revision must be {begun['model_revision']}, with which {training.resume_from_checkpoint} was begun "
            f"as commit {begun['model_commit']} of {name}, got {revision}, which is commit {commit}. Give the former, "
            "or start a new run, in another output_dir and without resume_from_checkpoint."
        )
    return {"model": name, "model_revision": revision, "model_commit": commit}


def plan_recipe(
    arguments: Sequence[str], n_gpus: Sequence[int], of_row: int | None = None, available: int | None = None
) -> str:
    """What each engine needs for the fine-tuning of a recipe on so many GPUs; nothing is loaded or written.

    Args:
        arguments: as of `fine_tune_recipe`.
        n_gpus: numbers of GPUs to look at, rising.
        of_row: GPUs that share a row; None for all.
        available: the most GPUs that may be advised; None for all that are looked at.

    Raises:
        ValueError: the recipe is wrong, of a restoration, or of weights in 4 or 8 bits, which are not counted.
        OSError: a file that is not there.
    """
    on_cpu = [] if torch.cuda.is_available() else ["--use_cpu", "true"]  # where bf16 would be refused
    _, training, model, _ = _parsed([*arguments, *on_cpu])
    require_model(model, trust_remote_code=trusts_code(training))
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError("--dry_run counts weights of 16 and 32 bits alone: leave load_in_4bit and load_in_8bit out.")
    loading: Any = training.model_init_kwargs or {}  # parsed from JSON by now
    config = AutoConfig.from_pretrained(
        model.model_name_or_path,
        revision=loading.get("revision", model.model_revision) or "main",
        trust_remote_code=trusts_code(training),
    )
    return engine_advice(
        config,
        training,
        adapter_config(model),
        loading.get("dtype", model.dtype),
        n_gpus,
        attention=loading.get("attn_implementation", model.attn_implementation),
        of_row=of_row,
        available=available,
    )


def _parsed(arguments: Sequence[str] | None) -> tuple[Any, ...]:
    try:
        parsed: tuple[Any, ...] = RecipeParser(FIELDS, prog="rope-patch train").parse_args_and_config(arguments)
        _require_counts(parsed[1])
        _require_no_evaluation(parsed[1], parsed[3])
        return parsed
    except ValueError as error:
        if "support bf16/gpu" not in str(error):  # of Transformers, for lack of a GPU
            raise
        raise ValueError(
            "there is no GPU that torch can see. `--use_cpu true --bf16 false` trains on the CPU, which is slow."
        ) from error


def _require_counts(training: RopeSFTConfig) -> None:
    """Raise ValueError for numbers with which nothing would be trained, and for a folder without a name."""
    if not str(training.output_dir):
        raise ValueError("output_dir must name a folder, got an empty name.")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(training, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(training, name)}.")
    if training.max_steps <= 0 and not training.num_train_epochs > 0:
        raise ValueError(
            f"num_train_epochs must be above 0 where max_steps is not, got {training.num_train_epochs} and max_steps="
            f"{training.max_steps}: nothing would be trained."
        )


def require_other_folder(output_dir: str | Path, model: ModelConfig) -> None:
    """Raise ValueError if the result would be written over the model that it comes from."""
    source = Path(str(model.model_name_or_path))
    if source.is_dir() and Path(output_dir).expanduser().resolve() == source.resolve():
        raise ValueError(
            f"output_dir is the folder of model_name_or_path, {output_dir}, which would be overwritten: name another."
        )


def require_model(model: ModelConfig, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """Raise ValueError unless the model is one, and all that is said of adapters has a use.

    Args:
        model: as the recipe says.
        revision: on the hub that is looked at; None is the one that the recipe says.
        trust_remote_code: run code that the model brings.
    """
    if model.model_name_or_path is None:
        raise ValueError("model_name_or_path must name the model, a hub id or the folder of a checkpoint.")
    require_no_adapter(model.model_name_or_path, "model_name_or_path")
    if model.model_revision != "main":  # TRL's default
        require_revision(model.model_revision, model.model_name_or_path, "model_revision")
    require_checkpoint(
        model.model_name_or_path, "model_name_or_path", revision or model.model_revision, trust_remote_code
    )
    require_tokenizer(model.model_name_or_path, "model_name_or_path")
    if model.use_peft:
        return
    of_adapters = [f for f in fields(ModelConfig) if f.name.startswith("lora_") or f.name in ("use_rslora", "use_dora")]
    changed = [f.name for f in of_adapters if getattr(model, f.name) != f.default]
    if changed:
        raise ValueError(f"{' and '.join(changed)} would have no effect: add use_peft: true, which trains adapters.")


def _splits(script: ScriptArguments, data: DatasetMixtureConfig) -> Any:
    """The text by split."""
    if bool(data.datasets) == bool(script.dataset_name):
        both = "both are given" if data.datasets else "neither is given"
        raise ValueError(
            "the recipe must name the text to train on, under `datasets` (files of yours: path: json, with data_files) "
            f"or as dataset_name (on the hub): {both}."
        )
    _require_read(script, data)
    names: list[Any] = [entry.data_files or entry.path for entry in data.datasets] or [script.dataset_name]
    try:
        if data.datasets:
            splits = get_dataset(data)
        else:
            splits = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
        for split in splits.values():
            require_utf8(split)
        return splits
    except READ_ERRORS as error:
        raise unreadable(names, error) from error
    except StopIteration as error:  # what `datasets` makes of JSON without a line
        raise unreadable(names, ValueError("a file of it is empty")) from error


def _require_read(script: ScriptArguments, data: DatasetMixtureConfig) -> None:
    """Raise ValueError for a field of the text that is read with the other way of naming it, `datasets` or a name."""
    if data.datasets:
        read_with, instead = "dataset_name", "datasets (streaming, and name in an entry, are theirs)"
        unread: dict[str, Any] = {name: getattr(script, name) for name in ("dataset_config", "dataset_streaming")}
    else:
        read_with, instead = "datasets", "dataset_name (dataset_streaming and dataset_test_split are its own)"
        unread = {name: getattr(data, name) for name in ("streaming", "test_split_size")}
    for name, value in unread.items():
        if value:
            raise ValueError(f"{name} is read with {read_with}, and has no effect on {instead}, got {value!r}.")
    if data.streaming and data.test_split_size:
        raise ValueError(
            "test_split_size holds out a part of texts that are all at hand, and streaming=True reads them one by one: "
            "leave one of the two out."
        )
