"""Next-token loss whose tokens differ in weight."""

from typing import Any

import torch
from torch import nn

from rope_kernels.vocabulary.checks import IGNORE_INDEX

from ..heads import head_losses
from ..limits import why_no_losses
from .consistency import ViewTape, weighting
from .cue import CueWeight
from .distiller import TAPE, Distiller, require
from .longce import LongCE


class WeightedDistiller(Distiller):
    """Next-token loss with weights of tokens, under whatever view is in force. Evaluation weighs all alike.

    Args:
        model: patched, bare or wrapped.
        longce: LongCE's weights, or None.
        cue: EndPrompt's, or None.
    """

    def __init__(self, model: nn.Module, longce: LongCE | None, cue: CueWeight | None = None) -> None:
        super().__init__(model)
        require(why_no_losses(self.core, self.decoder))
        self.longce, self.cue = longce, cue

    def _before_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape = kwargs.get(TAPE)
        if tape is not None and not tape.taught:
            tape.taught = True
            if decoder.training and self.longce is not None:
                tape.reference = self.longce.reference(self.core, decoder, tape.ids, tape.labelled)

    def _compare_student(self, tape: ViewTape, output: Any) -> None:
        labels = tape.labelled.next_label.flatten()
        tape.queries = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        ce_weight = torch.full((len(tape.queries),), 1 / tape.ce_divisor, device=labels.device)
        if self.cue is not None and self.decoder.training:
            ce_weight = ce_weight * self.cue.factors(tape.labelled).flatten()[tape.queries]
        tape.loss, tape.rows = head_losses(
            self.core,
            output.last_hidden_state.flatten(0, 1)[tape.queries],
            None,
            labels[tape.queries],
            ce_weight,
            None,
            **weighting(self.longce, tape),
        )
