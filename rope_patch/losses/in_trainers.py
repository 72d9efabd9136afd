"""Self-distillation in Transformers' `Trainer`, and in classes that derive from it."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Trainer

from ..forward.draw_clock import progress_at
from .in_loops import self_distillation_counts, self_distillation_loss


class SelfDistillSteps(Trainer):
    """A trainer whose training loss is `self_distillation_loss`; other trainers stand behind it among a class's bases.

    The loss of an optimizer step is a mean over its labels and documents on all ranks, however they lie in
    micro-batches. Evaluation has the loss of the trainer, at true positions.
    """

    draws: ClassVar[dict[str, Any]]
    """`view`, `seed` and `consistency` of `self_distillation_loss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # training_step would divide the loss by the number of micro-batches

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        model: Any = self.model
        counts = torch.stack([self_distillation_counts(model, batch, **self._draw()) for batch in batches]).sum(0)
        return batches, self.accelerator.reduce(counts.to(device))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = self_distillation_loss(model, inputs, **self._draw(), counts=num_items_in_batch)
        return loss * self.accelerator.num_processes  # gradients are averaged over ranks

    def _draw(self) -> dict[str, Any]:
        step = self.state.global_step
        return {**self.draws, "step": step, "progress": progress_at(step, self.state.max_steps)}
