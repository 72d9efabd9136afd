"""objective="hidden-distill": the short term of LongReD, a baseline."""

from typing import Any

import torch
from torch import nn

from rope_patch.distillation import HiddenDistiller, HiddenTargets

from ..step_means import Part
from .base import Objective, from_fields


class HiddenObjective(Objective):
    """Hidden states of the model as it was pretrained, distilled into the rescaled one.

    loss = weight sum over hidden states of (sum over tokens of 1 - cos) / tokens of the step, and short_to_long times
    that of the last hidden state under the view. Evaluation has the first part alone.

    Source: LongReD, arXiv:2502.07365, short-text and short-to-long distillation.
    """

    distiller: HiddenDistiller

    def _make_distiller(self, model: nn.Module) -> HiddenDistiller:
        targets = hidden_options(self.args._options("hidden_args"))
        return HiddenDistiller(model, targets, self._native(model))

    def check_length(self, length: int) -> None:
        self._warn_beyond_window(length)

    def _forward_options(self) -> dict[str, Any]:
        return {"output_hidden_states": True}

    def _combine(self, tape: Any, counts: dict[str, int], own: dict[str, int]) -> tuple[torch.Tensor, dict[str, Part]]:
        loss = self.distiller.targets.weight * tape.distance / counts["tokens"]
        parts: dict[str, Part] = {"hidden/distance": (tape.distance, own["tokens"])}
        if tape.far is not None:
            loss = loss + self.distiller.targets.short_to_long * tape.far / counts["tokens"]
            parts["hidden/far"] = (tape.far, own["tokens"])
        return loss, parts


def hidden_options(hidden_args: dict[str, Any]) -> HiddenTargets:
    """The options of the objective, checked.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    return from_fields(HiddenTargets, "hidden_args", hidden_args)
