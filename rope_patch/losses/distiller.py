"""Distillation in one call of a model: the teacher's forward runs before the student's."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..layout.labelled import document_of_tokens
from ..rope.rotary import find_decoder
from .forward_loss import DecoderCall, ForwardLoss, Tape, without_gradient
from .teacher import CopiedTeacher, SharedTeacher


class Distiller(ForwardLoss):
    """Inside `active()`, a forward that is given a tape runs the teacher on the same inputs, then the student.

    Args:
        model: the student, patched, bare or wrapped.
        teacher: the same weights with adapters off, or a frozen copy; None where a subclass needs none.

    Raises:
        ValueError: the student's RoPE is the teacher's, its family keeps the tape from its decoder, it learns prompts,
            or its embeddings are noised (NEFTune).
    """

    def __init__(self, model: nn.Module, teacher: SharedTeacher | CopiedTeacher | None = None) -> None:
        super().__init__(model)
        self.teacher: Any = teacher
        if isinstance(teacher, CopiedTeacher):
            self._text_modules |= {id(module) for module in find_decoder(teacher.copy).modules()}
        if teacher is not None:
            self._require_difference()

    def _require_difference(self) -> None:
        source = None if self.state is None else self.state.source
        if self.state is None or (not self.state.rescalings and not (source and source.view.perturbs)):
            raise ValueError(
                "teacher and student have the same RoPE, so there is nothing to distil: rescale the student, e.g. with "
                "rescale='yarn', or give it a view."
            )

    def require_taught_length(self, teacher: str, length: int) -> None:
        """Raise ValueError, of a `teacher` called so, if documents of `length` tokens are beyond its native window."""
        window = None if self.state is None else self.state.native.max_position_embeddings
        if window is not None and length > window:
            raise ValueError(
                f"{teacher} reads documents of at most {window} tokens, its window, got one of {length}. Lower "
                "max_length; views reach further positions than rows have tokens."
            )

    def tape(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """A tape for one forward of these inputs, with documents and padding as the model itself finds them.

        Where several ranks share a sequence, the inputs are those of whole rows.
        """
        document = document_of_tokens(input_ids, attention_mask, position_ids)
        tape = self._new_tape(document >= 0, document)
        tape.shard = None if self.state is None else self.state.shard
        return tape

    def _new_tape(self, valid: torch.Tensor, document: torch.Tensor) -> Any:
        raise NotImplementedError

    def _ask_teacher(self, tape: Tape, call: DecoderCall) -> Any:
        """The output of the teacher's decoder, whose attention has the tape too, without gradients."""
        tape.teaching = True
        shard = None if self.state is None else self.state.shard
        # a copy has no hook that does so
        kwargs = call.kwargs if shard is None else shard.without_padding_mask(call.kwargs)
        try:
            with without_gradient(tape.valid.device.type), self.teacher.ready() as teacher:
                with nullcontext() if shard is None else _attending_as_in_training(teacher):
                    return teacher(*call.args, **kwargs)
        finally:
            tape.teaching = False


@contextmanager
def _attending_as_in_training(decoder: nn.Module) -> Iterator[None]:
    """Training mode for attention modules: DeepSpeed's Ulysses lets those in eval mode attend to a rank's tokens alone.

    Nothing else of them may go by the mode, such as dropout.
    """
    frozen = [m for m in decoder.modules() if hasattr(m, "is_causal") and not m.training]
    for module in frozen:
        module.training = True
    try:
        yield
    finally:
        for module in frozen:
            module.training = False
