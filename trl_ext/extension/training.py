"""The training of an extension."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from ..config import LONG_DOCUMENTS, RopeSFTConfig
from ..engines.device import free_memory
from ..runs.folder import last_checkpoint
from .choices import Choices
from .facts import ModelFacts
from .options import ExtendOptions
from .short_rows import ShortRowsTrainer

_SAVES = 4  # checkpoints in a run, of which the last is kept


def training_fields(choices: Choices, options: ExtendOptions, n_steps: int) -> dict[str, Any]:
    """Fields of `RopeSFTConfig`, those of examples/recipes/smollm2_keep_64k.yaml but for what was chosen."""
    weights, on_cpu = choices.weights.value, options.device == "cpu"
    fields: dict[str, Any] = {
        **LONG_DOCUMENTS,
        **choices.rescaling.value,
        **choices.view.value,
        **{name: value for name, value in choices.objective.value.items() if value is not None},
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
        "save_steps": max(n_steps // _SAVES, 1),
        "save_total_limit": 1,
        "logging_steps": 1,
        "report_to": [],
        "seed": options.seed,
    }
    if weights["gradient_checkpointing"]:
        fields["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if weights["train"] == "qkv":
        fields["trainable"] = "qkv"
    return fields


def adapters(choices: Choices, facts: ModelFacts) -> Any:
    """PEFT's config of the adapters, None where the weights themselves are trained."""
    weights = choices.weights.value
    if weights["train"] != "lora":
        return None
    from peft import LoraConfig

    rank = weights["lora_rank"]
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(facts.attention_projections),
        task_type="CAUSAL_LM",
        revision=facts.base_revision,  # of the base model, which the export loads again
    )


def training_dtype(choices: Choices) -> torch.dtype:
    """Of the model that is loaded: weights that are trained are float32."""
    bf16 = choices.precision.value == "bf16" and choices.weights.value["train"] == "lora"
    return torch.bfloat16 if bf16 else torch.float32


def n_steps(n_rows: int, rows_per_step: int) -> int:
    """Optimizer steps of one epoch."""
    return -(-n_rows // rows_per_step)


def train(
    facts: ModelFacts,
    options: ExtendOptions,
    choices: Choices,
    rows: list[dict[str, Any]],
    folder: Path,
    result: Path,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Train, from the last checkpoint in `folder` if there is one, and save the result in `result`.

    The result has the dtype of the checkpoint that came, or is the adapter.

    Returns:
        Figures: steps, tokens, seconds of this call, and the loss over the last tenth of the steps.
    """
    steps = n_steps(len(rows), options.rows_per_step)
    config = RopeSFTConfig(output_dir=str(folder), **training_fields(choices, options, steps))
    loaded = facts.load(training_dtype(choices))
    trainer = ShortRowsTrainer(
        loaded.to(options.device),
        config,
        train_dataset=Dataset.from_dict(
            {name: [row[name] for row in rows] for name in ("input_ids", "completion_mask")}
        ),
        processing_class=facts.tokenizer,
        peft_config=adapters(choices, facts),
    )
    trainer.base_revision = facts.base_revision
    del loaded
    for printing in (ProgressCallback, PrinterCallback):  # they print every log as a dictionary
        trainer.remove_callback(printing)
    progress = _Progress(tell, len(rows), options.rows_per_step)
    trainer.add_callback(progress)
    checkpoint = last_checkpoint(folder)
    begin = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        progress.close()
    seconds = time.perf_counter() - begin
    if choices.weights.value["train"] != "lora":
        trainer.model.to(facts.dtype)
    trainer.save_model(str(result))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tail = losses[-max(1, len(losses) // 10) :]
    figures = {
        "steps": trainer.state.global_step,
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "seconds": seconds,
        "loss": sum(tail) / len(tail),
    }
    del trainer
    free_memory()
    return figures


class _Progress(TrainerCallback):
    """A bar over rows with the last loss in it; the time left is told once, by the first steps.

    A step takes minutes where rows are long, so the bar moves with every forward and backward of it.
    """

    def __init__(self, tell: Callable[[str], None], n_rows: int, rows_per_step: int) -> None:
        self.tell = tell
        self.rows_per_step = rows_per_step
        self.bar = tqdm(total=n_rows, unit="row", dynamic_ncols=True)
        self.began: tuple[int, float] | None = None
        self.told = False

    def close(self) -> None:
        """End the bar, also of a training that was stopped, which would be drawn again behind what is said then."""
        self.bar.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.reset()  # its time begins here
        self.bar.initial = self.bar.n = self._rows_of(state.global_step)  # of a run that goes on
        self.bar.refresh()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # short rows may have been read together: the end of the step counts the others
        self._move_to(min(self.bar.n + 1, self._rows_of(state.global_step + 1) - 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._move_to(self._rows_of(state.global_step))
        if self.began is None:  # the first step compiles, and plans its attention
            self.began = state.global_step, time.perf_counter()
        elif not self.told and self.began[0] + 2 <= state.global_step < state.max_steps:
            each = (time.perf_counter() - self.began[1]) / (state.global_step - self.began[0])
            left = (state.max_steps - state.global_step) * each / 60
            self.tell(f"By the first steps training takes {left:.1f} minutes more.")
            self.told = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")

    def _rows_of(self, steps: int) -> int:
        return min(steps * self.rows_per_step, self.bar.total)

    def _move_to(self, row: int) -> None:
        self.bar.update(row - self.bar.n)
