"""An objective with options of its own, as a package of its own writes it."""

from dataclasses import dataclass

import torch

from rope_patch.losses.forward_loss import ForwardLoss, LossRequest
from trl_ext.objectives import OBJECTIVES, Objective, ObjectiveOptions


class SquaredStates(ForwardLoss):
    """Sum of squares of last hidden states."""

    def after(self, request, output):
        request.result = output.last_hidden_state[request.valid].square().sum()


@dataclass(frozen=True, kw_only=True)
class Times:
    factor: float


@dataclass(frozen=True, kw_only=True)
class ScaledOptions(ObjectiveOptions):
    """Options of "scaled-states".

    Args:
        scale: what multiplies the loss; None is 1.
    """

    scale: Times | None = None


@OBJECTIVES.register("scaled-states")
class ScaledStates(Objective):
    """loss = factor (sum over tokens of |h|^2) / tokens of the step.

    When: Take it in tests.
    """

    help = "the mean square of last hidden states"
    options_class = ScaledOptions

    def _make_loss(self, model):
        return SquaredStates(model)

    def _request(self, inputs, read, counts):
        return LossRequest(read, torch.zeros_like(inputs["input_ids"]))

    def _combine(self, request, counts, batch_counts):
        factor = self.options.scale.factor if self.options.scale else 1.0
        return factor * request.result / counts["tokens"], {"square": (request.result, batch_counts["tokens"])}
