"""Next-token loss whose tokens differ in weight."""

from typing import Any

import torch
from torch import nn

from rope_kernels.linear_ce import IGNORE_INDEX

from ..heads import head_losses
from .consistency import ViewTape, weighting
from .distiller import TAPE, Distiller
from .longce import LongCE


class WeightedDistiller(Distiller):
    """Next-token loss with LongCE's token weights, under whatever view is in force.

    Args:
        model: patched, bare or wrapped.
        longce: the weights.
    """

    def __init__(self, model: nn.Module, longce: LongCE) -> None:
        super().__init__(model)
        self.longce = longce

    def _before_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape = kwargs.get(TAPE)
        if tape is not None and not tape.taught:
            tape.taught = True
            if decoder.training:
                tape.reference = self.longce.reference(self.core, decoder, tape.ids, tape.labelled)

    def _compare_student(self, tape: ViewTape, output: Any) -> None:
        labels = tape.labelled.next_label.flatten()
        tape.queries = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        tape.loss, tape.rows = head_losses(
            self.core,
            output.last_hidden_state.flatten(0, 1)[tape.queries],
            None,
            labels[tape.queries],
            torch.full((len(tape.queries),), 1 / tape.ce_divisor, device=labels.device),
            None,
            **weighting(self.longce, tape),
        )
