"""The training of an extension."""

from collections.abc import Callable
from typing import Any

import torch
import yaml
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ..config import LONG_DOCUMENTS
from ..engines.device import free_memory
from ..recipes.fine_tuning import Figures, run
from ..recipes.launching import Launch
from ..recipes.stages import Stage, read_stages
from ..runs.folder import read_run_record
from .choices import Choices
from .facts import ModelFacts
from .options import ADAPTERS, ExtendOptions
from .short_rows import ShortRowsTrainer

RECIPE = "recipe.yaml"
"""The recipe of the training, in the folder of the extension."""

_SAVES = 4  # checkpoints in a run, of which the last is kept


def training_fields(choices: Choices, options: ExtendOptions, n_steps: int) -> dict[str, Any]:
    """Fields of `RopeSFTConfig`: those of examples/recipes/smollm2_keep_64k.yaml, changed by the choices."""
    weights, on_cpu = choices.weights.value, options.device == "cpu"
    fields: dict[str, Any] = {
        **LONG_DOCUMENTS,
        **choices.rescaling.value,
        **choices.view.value,
        **choices.objective.value,
        "max_length": choices.rows.value["length"],
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": options.rows_per_step,
        "num_train_epochs": 1,
        "learning_rate": choices.rate.value,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine_warmup_with_min_lr",  # others begin at a rate of 0
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.05,
        "bf16": choices.precision.value == "bf16",
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "gradient_checkpointing": weights["gradient_checkpointing"],
        "save_steps": save_steps(n_steps),
        "save_total_limit": 1,
        "logging_steps": 1,
        "report_to": list(options.report_to) or "none",
        "seed": options.seed,
    }
    if weights["gradient_checkpointing"]:
        fields["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if weights["train"] == "qkv":
        fields["trainable"] = "qkv"
    return fields


def recipe(facts: ModelFacts, options: ExtendOptions, choices: Choices, n_rows: int) -> dict[str, Any]:
    """The recipe of the training on `rows.jsonl`: one stage, so that training and export are resumed by recipes."""
    weights = choices.weights.value
    has_adapters = weights["train"] in ADAPTERS
    in_16_bits = has_adapters and choices.precision.value == "bf16"  # weights that are trained are float32
    keys: dict[str, Any] = {
        "model_name_or_path": facts.name,
        "model_revision": facts.base_revision or "main",
        "dtype": "bfloat16" if in_16_bits else "float32",
        "datasets": [{"path": "json", "data_files": str(options.folder / "rows.jsonl"), "split": "train"}],
        **training_fields(choices, options, n_steps(n_rows, options.rows_per_step)),
        "output_dir": str(options.folder),
        "stages": [{"name": "training"}],
        "export": {"window": options.to, "check": True},
    }
    if has_adapters:
        keys |= {
            "use_peft": True,
            "lora_r": weights["lora_rank"],
            "lora_alpha": 2 * weights["lora_rank"],
            "lora_dropout": 0.0,
            "lora_target_modules": list(facts.attention_projections),
        }
    if weights["train"] == "qlora":
        keys |= {"load_in_4bit": True, "use_bnb_nested_quant": True}
    return keys


def stage_of(keys: dict[str, Any], **changes: Any) -> Stage:
    """The stage of a recipe with `changes`, to check it or to count its memory; nothing is loaded."""
    on_cpu: dict[str, Any] = {} if torch.cuda.is_available() else {"use_cpu": True}  # where bf16 would be refused
    (stage,) = read_stages(keys, **on_cpu, **changes)
    return stage


def n_steps(n_rows: int, rows_per_step: int) -> int:
    """Optimizer steps of one epoch."""
    return -(-n_rows // rows_per_step)


def save_steps(n_steps: int) -> int:
    """Steps between two checkpoints."""
    return max(n_steps // _SAVES, 1)


def train(
    keys: dict[str, Any],
    options: ExtendOptions,
    n_rows: int,
    tell: Callable[[str], None],
    command: list[str] | None = None,
) -> Figures:
    """Train by the recipe `keys`, and export to the folder "model"; the same call resumes a stopped one.

    Args:
        keys: of the recipe.
        options: of the extension.
        n_rows: in `rows.jsonl`.
        tell: called with each line of output.
        command: arguments of `rope-patch` that train on several GPUs; None trains in this process.

    Raises:
        ChildProcessError: a process of `command` has failed, and has printed why.
    """
    file = options.folder / RECIPE
    file.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    if command is not None:
        tell(f"  rope-patch {' '.join(command)}")
        launch, arguments = Launch.take(command)
        status = 0 if launch is None else launch.run(arguments)
        if status:
            raise ChildProcessError(f"training has ended with status {status}, for the reason above.")
    else:
        progress = _Progress(n_rows, options.rows_per_step)
        try:
            run(read_stages(keys, source=str(file)), ShortRowsTrainer, progress)
        finally:
            progress.close()
            free_memory()
    return Figures(**read_run_record(options.folder / "training/stage.json"))


class _Progress(TrainerCallback):
    """A progress bar over rows, as a step may take minutes, with the last loss."""

    def __init__(self, n_rows: int, rows_per_step: int) -> None:
        self.rows_per_step = rows_per_step
        self.bar = tqdm(total=n_rows, unit="row", dynamic_ncols=True)

    def close(self) -> None:
        """Close the bar, which would otherwise be drawn again below later output."""
        self.bar.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.reset()  # restarts its clock
        self.bar.initial = self.bar.n = self._rows_of(state.global_step)  # of a resumed run
        self.bar.refresh()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # joined short rows count at the end of the step
        self._move_to(min(self.bar.n + 1, self._rows_of(state.global_step + 1) - 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._move_to(self._rows_of(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")

    def _rows_of(self, steps: int) -> int:
        return min(steps * self.rows_per_step, self.bar.total)

    def _move_to(self, row: int) -> None:
        self.bar.update(row - self.bar.n)
