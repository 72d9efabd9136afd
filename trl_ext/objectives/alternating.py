"""Two objectives in one run: the second, at true positions, replaces the first in every n-th optimizer step."""

from typing import Any

import torch
from torch import nn

from rope_patch import rope_view
from rope_patch.views import View

from .base import Objective
from .step_means import Part


class AlternatingObjective(Objective):
    """Minimises `extend`, and in every `every`-th optimizer step `restore` instead, at true positions.

    With self-distillation and relations, this keeps short contexts as the model was pretrained while long ones are
    distilled. Evaluation is that of `extend`.

    Args:
        extend: the objective of most steps.
        restore: the objective of every `every`-th step, counted from 1.
        every: at least 2.
    """

    def __init__(self, extend: Objective, restore: Objective, every: int) -> None:
        self.extend, self.restore, self.every = extend, restore, every
        self.current = extend

    def begin(self, step: int | None, first_document: int = 0) -> None:
        """Choose the objective of an optimizer step, counted from 0; None is evaluation."""
        restores = step is not None and (step + 1) % self.every == 0
        self.current = self.restore if restores else self.extend
        self.current.begin(step, first_document)

    def check_length(self, length: int) -> None:
        self.restore.check_length(length)
        self.extend.check_length(length)

    def check_evaluation(self, length: int, view: View) -> None:
        self.extend.check_evaluation(length, view)

    def check_documents(self, lengths: torch.Tensor) -> None:
        self.extend.check_documents(lengths)

    @property
    def teacher(self) -> Any:  # type: ignore[override]
        """The pretrained model, which the objectives share if both have one."""
        return self.extend.teacher or self.restore.teacher

    @property
    def forward_loss(self) -> Any:
        """Of the current objective."""
        return self.current.forward_loss

    @property
    def draws(self) -> bool:
        return self.current is self.extend and self.extend.draws  # a step that restores runs at true positions

    def read(self, batch: dict[str, Any]) -> Any:
        return self.current.read(batch)

    def counts(self, read: Any) -> dict[str, int]:
        return self.current.counts(read)

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], read: Any, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        if self.current is self.extend:
            return self.extend.loss(model, inputs, read, counts, batch_counts)
        # relations are those of the positions that the pretrained model knows
        with rope_view(self.restore.forward_loss.decoder, "standard"):
            return self.restore.loss(model, inputs, read, counts, batch_counts)
