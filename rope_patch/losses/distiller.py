"""Distillation in one call of a model: the teacher's forward runs before the student's."""

from typing import Any

import torch
from torch import nn

from ..layout.labelled import document_of_tokens
from ..rope.rotary import find_decoder
from .forward_loss import DecoderCall, ForwardLoss, LossRequest, without_gradient
from .teacher import CopiedTeacher, OtherTeacher, SharedTeacher


class Distiller(ForwardLoss):
    """Inside `active()`, a forward that gets a `LossRequest` runs the teacher on its inputs first, then the student.

    Args:
        model: the student, patched, bare or wrapped.
        teacher: the same weights with adapters off, a frozen copy, or another model; None if the loss needs none.

    Raises:
        ValueError: student and teacher have the same RoPE, or the model is refused by `ForwardLoss`.
    """

    def __init__(self, model: nn.Module, teacher: SharedTeacher | OtherTeacher | None = None) -> None:
        super().__init__(model)
        self.teacher: Any = teacher
        if isinstance(teacher, OtherTeacher):
            # its attention answers the request too: `RelationRequest.visit` records the teacher's tensors
            self._text_modules |= {id(module) for module in find_decoder(teacher.copy).modules()}
        if isinstance(teacher, SharedTeacher | CopiedTeacher):
            self._require_difference()

    def _require_difference(self) -> None:
        source = None if self.state is None else self.state.source
        if self.state is None or (not self.state.rescalings and not (source and source.view.perturbs)):
            raise ValueError(
                "teacher and student have the same RoPE, so there is nothing to distil: rescale the student, e.g. with "
                "rescale='yarn', or give it a view."
            )

    def require_taught_length(self, teacher: str, length: int) -> None:
        """Raise ValueError if documents of `length` tokens exceed the teacher's context window; `teacher` names it."""
        window = None if self.state is None else self.state.native.max_position_embeddings
        if window is not None and length > window:
            raise ValueError(
                f"{teacher} reads documents of at most {window} tokens, its context window, got one of {length}. Lower "
                "max_length: views train positions beyond it without longer documents."
            )

    def request(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """Make the request for one forward of these inputs; documents and padding are found as the model finds them.

        If several ranks share a sequence, pass the inputs of whole sequences.
        """
        document = document_of_tokens(input_ids, attention_mask, position_ids)
        request = self._new_request(document >= 0, document)
        request.shard = None if self.state is None else self.state.shard
        return request

    def _new_request(self, valid: torch.Tensor, document: torch.Tensor) -> Any:
        raise NotImplementedError

    def _ask_teacher(self, request: LossRequest, call: DecoderCall) -> Any:
        """Run the teacher's decoder without gradients and return its output; its attention gets the request too."""
        request.teaching = True
        shard = None if self.state is None else self.state.shard
        # the student's hooks do this for the student's forward; a copy has no hooks
        kwargs = call.kwargs if shard is None else shard.without_padding_mask(call.kwargs)
        try:
            with without_gradient(request.valid.device.type), self.teacher.ready() as teacher:
                # in eval mode, DeepSpeed's Ulysses attends to the tokens of one rank only, so attention modules go to
                # training mode; nothing else in them may depend on it, such as dropout
                attention = [] if shard is None else [m for m in teacher.modules() if hasattr(m, "is_causal")]
                in_eval = [module for module in attention if not module.training]
                for module in in_eval:
                    module.training = True
                try:
                    return teacher(*call.args, **kwargs)
                finally:
                    for module in in_eval:
                        module.training = False
        finally:
            request.teaching = False
