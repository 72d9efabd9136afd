"""Small evaluations during training, logged where the trainer logs."""

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rope_patch.base.validators import require_integer
from rope_patch.eval import loss_by_position
from rope_patch.patch import view_source


class LossByPositionCallback(TrainerCallback):
    """Log loss within the window, loss beyond it and the cliff every `every` optimizer steps, and at the end.

    The figures are logged in an entry of their own, so go to whatever `report_to` names (TensorBoard, W&B, trackio), as
    `long/loss_in_window`, `long/loss_beyond` and `long/cliff`. A view that is always on draws the same for a row
    in each of them.

    Args:
        trainer: whose log is written; add the callback with `trainer.add_callback`.
        rows: held-out token ids, int64 [n_rows, seq_len], longer than `window`, each beginning as the tokenizer begins
            a text: `rope_patch.eval.text_rows` makes them.
        window: trained window, in positions; None means the model's own.
        every: optimizer steps between two evaluations.

    Raises:
        ValueError: `every` below 1, or rows that end within the window.
    """

    def __init__(self, trainer: Trainer, rows: torch.Tensor, *, window: int | None = None, every: int = 100) -> None:
        from rope_patch.eval.measures.subject import Subject

        require_integer("every", every, least=1)
        subject = Subject(trainer.model)  # type: ignore[arg-type]
        self.window = subject.trained_window if window is None else window
        if self.window is None:
            raise ValueError("the model's config names no trained window: pass window, in positions.")
        subject.check_rows(rows, at_least=self.window + 2)
        self.trainer = trainer
        self.rows = rows
        self.every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            due = control.should_log  # every log resets it, and the entry of the step is still to be written
            self._measure(kwargs["model"])
            control.should_log = due

    def _measure(self, model: torch.nn.Module) -> None:
        source = view_source(model)
        if source is not None and source.clock.is_set and not source.clock.by_content:
            # RopeSFTTrainer's clock is set to a training batch until the next forward: draw by the content of rows
            source.clock.set_step(-1)
        # every rank takes part: a sharded model can only run as a whole; `log` writes on the first one alone
        args = self.trainer.args
        device_type = args.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=bool(args.bf16)):
            curve = loss_by_position(model, self.rows, progress=False)
        inside, cliff = curve.in_window(self.window), curve.cliff(self.window)
        figures = {"long/loss_in_window": inside, "long/loss_beyond": inside + cliff, "long/cliff": cliff}
        Trainer.log(self.trainer, figures)  # TRL's log would add the metrics of the step
