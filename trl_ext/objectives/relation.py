"""objective="relation-distill": LinearARD."""

from typing import Any

import torch
from torch import nn

from rope_patch.distillation import LogitKL, RelationDistiller, RelationTargets

from ..step_means import Part
from .base import Objective, from_fields


class RelationObjective(Objective):
    """Relations of the model as it was pretrained, distilled into the rescaled one.

    loss = sum_X weight_X (sum over layers, heads and tokens of KL) / (layers * heads * tokens of the step), and beside
    it the logit KL's weight times its mean over the tokens that it counts; with weight 0 that is logged alone.

    Source: LinearARD, arXiv:2604.00004.
    """

    distiller: RelationDistiller

    def _make_distiller(self, model: nn.Module) -> RelationDistiller:
        targets, logit_kl = relation_options(self.args._options("relation_args"), self.args._options("logit_kl_args"))
        return RelationDistiller(
            model, targets, self._native(model), logit_kl=logit_kl, offload=self.args.teacher_offload
        )

    def check_length(self, length: int) -> None:
        self._warn_beyond_window(length)

    def counts(self, read: torch.Tensor) -> dict[str, int]:
        """Real tokens, and those that the logit KL counts."""
        counts = super().counts(read)
        if self.distiller.logit_kl is not None:
            counts["last"] = int(self.distiller.logit_kl.chosen(read).sum())
        return counts

    def _combine(self, tape: Any, counts: dict[str, int], own: dict[str, int]) -> tuple[torch.Tensor, dict[str, Part]]:
        sums = {name: tape.loss(name) for name in self.distiller.targets.weights}
        loss = torch.stack([weight * sums[name] for name, weight in self.distiller.targets.weights.items()]).sum()
        loss = loss / counts["tokens"]
        parts: dict[str, Part] = {name: (total, own["tokens"]) for name, total in sums.items()}
        if self.distiller.logit_kl is not None:
            if self.distiller.logit_kl.weight:
                loss = loss + self.distiller.logit_kl.weight * tape.logit_kl / counts["last"]
            parts["logit_kl"] = (tape.logit_kl, own["last"])
        return loss, {f"relation/{name}": value for name, value in parts.items()}


def relation_options(
    relation_args: dict[str, Any], logit_kl_args: dict[str, Any] | None
) -> tuple[RelationTargets, LogitKL | None]:
    """The options of the objective, checked; no logit KL without logit_kl_args.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    targets = from_fields(RelationTargets, "relation_args", relation_args)
    return targets, from_fields(LogitKL, "logit_kl_args", logit_kl_args) if logit_kl_args else None
