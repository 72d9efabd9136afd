"""objective="self-distill" with restore_every: extend in most optimizer steps, restore in the others."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from rope_patch import rope_view
from rope_patch.rotary import find_decoder
from rope_patch.state import state_of

from ..step_means import Part
from .base import Objective
from .relation import RelationObjective
from .self_distill import SelfDistillObjective

if TYPE_CHECKING:
    from ..config import RopeSFTConfig


class AlternatingObjective(Objective):
    """Self-distillation between views; every `restore_every`-th optimizer step distils relations instead.

    Relations are LinearARD's, of the model as it was pretrained into the rescaled one, both at true positions. What is
    distilled far away is thereby held to what the model knew near by. Evaluation is that of self-distillation.

    Args:
        model: patched and rescaled, with its adapters.
        args: of the trainer.
        accelerator: of the trainer.

    Raises:
        ValueError: the model is not rescaled: its relations would be the teacher's.
    """

    def __init__(self, model: nn.Module, args: "RopeSFTConfig", accelerator: Accelerator) -> None:
        self.args, self.accelerator = args, accelerator
        self.decoder = find_decoder(model)
        state = state_of(self.decoder)
        if state is None or not state.rescalings:
            raise ValueError("restore_every restores a rescaled model: give rescale, e.g. 'yarn', or leave it out.")
        self.restore = RelationObjective(model, args, accelerator)
        self.extend = SelfDistillObjective(model, args, accelerator, teacher=self.restore.teacher)
        self.current: Objective = self.extend

    def begin(self, step: int | None, first_document: int = 0) -> None:
        """Take the objective of an optimizer step, the first one being 0; None is evaluation."""
        assert self.args.restore_every is not None
        restores = step is not None and (step + 1) % self.args.restore_every == 0
        self.current = self.restore if restores else self.extend
        self.current.begin(step, first_document)

    def check_length(self, length: int) -> None:
        self.restore.check_length(length)
        self.extend.check_length(length)

    def check_documents(self, lengths: torch.Tensor) -> None:
        self.extend.check_documents(lengths)

    @property
    def draws(self) -> bool:
        return self.current is self.extend and self.extend.draws

    def active(self) -> AbstractContextManager[None]:
        return self.current.active()

    def read(self, batch: dict[str, Any]) -> Any:
        return self.current.read(batch)

    def counts(self, read: Any) -> dict[str, int]:
        return self.current.counts(read)

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], read: Any, counts: dict[str, int], own: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        if self.current is self.extend:
            return self.extend.loss(model, inputs, read, counts, own)
        with rope_view(self.decoder, "standard"):
            return self.restore.loss(model, inputs, read, counts, own)
