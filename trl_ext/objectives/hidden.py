"""objective="hidden-distill": short-text distillation of LongReD, a baseline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.base import papers
from rope_patch.losses import HiddenDistiller, HiddenTargets

from .base import OBJECTIVES, ActivationFactors, Objective, ObjectiveOptions
from .step_means import Part


@dataclass(frozen=True, kw_only=True)
class HiddenOptions(HiddenTargets, ObjectiveOptions):
    """Options of "hidden-distill"."""

    @property
    def needs_teacher(self) -> bool:
        return True

    def activation_factors(self, config: Any, moved: float = 1.0, *, shared: bool = False) -> ActivationFactors:
        n_layers = config.num_hidden_layers + 1  # hidden states of teacher and student, of which some are compared
        return ActivationFactors(graphs=2.0 if self.short_to_long else 1.0, beside=2.0 * n_layers)

    def cited(self) -> tuple[str, ...]:
        return (papers.LONGRED,)


@OBJECTIVES.register("hidden-distill")
class HiddenObjective(Objective):
    """Hidden states of the model as it was pretrained, distilled into the rescaled one.

    loss = weight sum over hidden states of (sum over tokens of 1 - cos) / tokens of the step, and short_to_long times
    that of the last hidden state under the view. Evaluation has the first part alone.

    When: Take it in place of 'relation-distill', to hold a rescaled model to its own hidden states.

    Source: LongReD, arXiv:2502.07365, short-text and short-to-long distillation.
    """

    help = "distils hidden states of the model as it was pretrained into the rescaled one"
    synonyms = ("longred",)
    shares_sequences = True
    options_class = HiddenOptions
    _forward_options: ClassVar[Mapping[str, Any]] = {"output_hidden_states": True}
    options: HiddenOptions
    forward_loss: HiddenDistiller

    def _make_loss(self, model: nn.Module) -> HiddenDistiller:
        return HiddenDistiller(model, self.options, self._native(model))

    def check_length(self, length: int) -> None:
        self._warn_beyond_window(length)

    def _combine(
        self, request: Any, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        loss = self.options.weight * request.distance / counts["tokens"]
        parts: dict[str, Part] = {"hidden/distance": (request.distance, batch_counts["tokens"])}  # without its weight
        if request.far is not None:  # in training with short_to_long
            loss = loss + self.options.short_to_long * request.far / counts["tokens"]
            parts["hidden/far"] = (request.far, batch_counts["tokens"])
        return loss, parts
