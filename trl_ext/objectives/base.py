"""The seam between the trainer and an objective that distils."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from rope_patch.distillation import TAPE, CopiedTeacher, SharedTeacher
from rope_patch.distillation.distiller import Distiller, real_tokens
from rope_patch.distillation.teacher import adapter_layers
from rope_patch.methods import from_options
from rope_patch.rotary import find_core

from ..step_means import Part

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

logger = logging.get_logger(__name__)


class Objective:
    """A loss that is computed while the student's forward runs.

    Args:
        model: patched, with its adapters, before anything wraps it.
        args: of the trainer.
        accelerator: of the trainer.
        teacher: the model as it was pretrained, if there is one already.
    """

    def __init__(
        self,
        model: nn.Module,
        args: "RopeSFTConfig",
        accelerator: Accelerator,
        teacher: SharedTeacher | CopiedTeacher | None = None,
    ) -> None:
        self.args, self.accelerator, self.teacher = args, accelerator, teacher
        self.distiller = self._make_distiller(model)

    @property
    def draws(self) -> bool:
        """Whether forwards of the step draw the view."""
        return True

    def check_length(self, length: int) -> None:
        """Raise, or warn, if documents of `length` tokens are more than the objective can compare."""

    def check_documents(self, lengths: torch.Tensor) -> None:
        """Raise, or warn, if training documents of these lengths, int64 [documents], add nothing to the loss."""

    def begin(self, step: int | None, first_document: int = 0) -> None:
        """Called before the batches of an optimizer step are read, and with None before one of an evaluation.

        Args:
            step: the first one is 0.
            first_document: ordinal of the batch's first document within the evaluation.
        """

    def active(self) -> AbstractContextManager[None]:
        """To be open around forward and backward of a step."""
        return self.distiller.active()

    def read(self, batch: dict[str, Any]) -> Any:
        """What of a batch `counts` and `loss` need, read once: here which tokens are real, bool [batch, n]."""
        return real_tokens(batch["input_ids"], batch.get("attention_mask"))

    def counts(self, read: Any) -> dict[str, int]:
        """What the sums of a batch are divided by, for adding up over an optimizer step."""
        return {"tokens": int(read.sum())}

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], read: Any, counts: dict[str, int], own: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        """Run teacher and student.

        Args:
            model: the student, wrapped as the trainer has it.
            inputs: of the batch.
            read: of the batch.
            counts: of the optimizer step that the batch belongs to.
            own: of the batch alone.

        Returns:
            The loss, and its parts before weighting, each as its sum over the batch's own tokens, documents or rows,
            and the number of those: over all batches of a step their means are what the loss is made of.
        """
        tape = self._tape(inputs, read, counts)
        tie = self._call(model, inputs, tape)
        loss, parts = self._combine(tape, counts, own)
        return loss + tie, parts

    def _call(self, model: nn.Module, inputs: dict[str, Any], tape: Any) -> torch.Tensor:
        """Run the model with a tape; returns a zero that ties every parameter of the path to the loss.

        The loss needs no logits; those of the last token are what wrappers that wait for all gradients want.
        """
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**inputs, **self._forward_options(), logits_to_keep=1, use_cache=False, **{TAPE: tape})
        zero: torch.Tensor = 0.0 * outputs.logits.float().sum()
        return zero

    def _warn_beyond_window(self, length: int) -> None:
        state = self.distiller.state
        window = None if state is None else state.native.max_position_embeddings
        if window is not None and length > window:
            logger.warning(
                "the teacher is the model as it was pretrained, and documents have up to "
                f"{length} tokens, beyond its window of {window}: there it teaches what it never learned. Lower "
                "max_length."
            )

    def _native(self, model: nn.Module) -> SharedTeacher | CopiedTeacher:
        """The model as it was pretrained: its own weights where it has adapters, else a copy."""
        if self.teacher is None:
            has_adapters = find_core(model) is not model or adapter_layers(model)
            offload = self.args.teacher_offload
            self.teacher = SharedTeacher(model) if has_adapters else CopiedTeacher(model, offload=offload)
        return self.teacher

    def _make_distiller(self, model: nn.Module) -> Distiller:
        raise NotImplementedError

    def _tape(self, inputs: dict[str, Any], read: Any, counts: dict[str, int]) -> Any:
        return self.distiller.tape(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids"))

    def _forward_options(self) -> dict[str, Any]:
        return {}

    def _combine(self, tape: Any, counts: dict[str, int], own: dict[str, int]) -> tuple[torch.Tensor, dict[str, Part]]:
        raise NotImplementedError


T = TypeVar("T")


def from_fields(cls: type[T], name: str, options: dict[str, Any]) -> T:
    """The options of an objective as the object that checks them.

    Raises:
        ValueError: an unknown option, one that is missing, or one out of its range.
    """
    try:
        return from_options(cls, name, options)
    except ValueError as error:
        known = str(error) if name in str(error) else f"{name}: {error}"
        raise ValueError(known) from error
