"""objective="self-distill": RPSD."""

from typing import Any

import torch
from torch import nn

from rope_patch.distillation import Control, ControlDistiller, ViewConsistency, ViewDistiller
from rope_patch.distillation.consistency import ViewTape
from rope_patch.distillation.labelled import Labelled
from rope_patch.views import Skip

from .base import from_fields
from .next_token import NextTokenObjective, longce_options


class SelfDistillObjective(NextTokenObjective):
    """Next-token loss under true positions, and the KL of the sampled view's predictions to those.

    loss = (sum of cross-entropies) / labels of the step + kl_weight L_KL, with L_KL as in
    `rope_patch.distillation.ViewConsistency` over the documents of the optimizer step. Evaluation gives the
    cross-entropy alone, and logs the KL beside it.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6.
    """

    distiller: ViewDistiller | ControlDistiller

    def _make_distiller(self, model: nn.Module) -> ViewDistiller | ControlDistiller:
        consistency, control = self_distill_options(self.args.kl_weight, self.args._options("self_distill_args"))
        longce = longce_options(self.args)
        if control is not None:
            return ControlDistiller(model, consistency, control, longce)
        return ViewDistiller(model, consistency, longce)

    def counts(self, read: Labelled) -> dict[str, int]:
        """Real tokens, labels, documents, and the sum of L - s that the clock's draws give."""
        counts = {**super().counts(read), "documents": read.n_documents}
        if self.distiller.consistency.reduction == "token":
            counts["suffix"] = read.suffix_total(self.distiller.affected_from(read))
        return counts

    def _kl_divisor(self, counts: dict[str, int]) -> int:
        return max(1, counts["suffix" if self.distiller.consistency.reduction == "token" else "documents"])

    def _parts(self, tape: ViewTape, own: dict[str, int]) -> dict[str, torch.Tensor]:
        parts = super()._parts(tape, own)
        if tape.view_ce is not None:
            parts["view_ce"] = tape.view_ce / max(own["labels"], 1)
        if not self.distiller.consistency.weight and self.distiller.decoder.training:
            return parts  # no KL was computed
        kl = tape.rows.kl
        if self.distiller.consistency.reduction == "sequence":
            kl = kl * (1.0 / tape.suffix_length.flatten()[tape.queries].clamp(min=1))
        return {**parts, "kl": kl.sum() / self._kl_divisor(own), **self._by_depth(tape), **self._by_skip(tape)}

    def _by_depth(self, tape: ViewTape) -> dict[str, torch.Tensor]:
        """Mean KL of the queries in each quarter of their document."""
        labelled = tape.labelled
        length = labelled.documents.length.expand_as(labelled.t)
        return _by_quarter("kl/depth", tape, labelled.t, length)

    def _by_skip(self, tape: ViewTape) -> dict[str, torch.Tensor]:
        """Mean KL by how far the view moves the suffix, in quarters of the largest skip that it draws."""
        if isinstance(self.distiller, ControlDistiller):
            return {}
        source = self.distiller.source
        assert source.last is not None
        if not isinstance(source.view, Skip) or source.view.skip is not None:
            return {}
        skip = source.last.parameters["skip"].expand_as(tape.labelled.t)
        largest = tape.labelled.documents.length.expand_as(skip)
        if source.view.max_skip is not None:
            largest = torch.full_like(skip, source.view.max_skip)
        return _by_quarter("kl/skip", tape, skip - 1, largest)


def _by_quarter(name: str, tape: ViewTape, value: torch.Tensor, end: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean KL of the queries whose value is in each quarter of [0, end), nan where there are none."""
    quarter = (4 * value // end.clamp(min=1)).clamp(max=3).flatten()[tape.queries]
    chosen = tape.in_kl.flatten()[tape.queries]
    means = {}
    for i in range(4):
        here = chosen & (quarter == i)
        means[f"{name}_{i + 1}of4"] = torch.where(here, tape.rows.kl, 0.0).sum() / here.sum()
    return means


# names in self_distill_args -> fields of Control
_CONTROL = {"control": "kind", "strength": "strength"}


def self_distill_options(kl_weight: float, self_distill_args: dict[str, Any]) -> tuple[ViewConsistency, Control | None]:
    """The options of the objective, checked.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    if "weight" in self_distill_args:
        raise ValueError("self_distill_args has no weight: give kl_weight.")
    control = {new: self_distill_args[old] for old, new in _CONTROL.items() if old in self_distill_args}
    rest = {name: value for name, value in self_distill_args.items() if name not in _CONTROL}
    if "strength" in control and control.get("kind") is None:
        raise ValueError("strength in self_distill_args is that of a control: give control='dropout', or leave it out.")
    return (
        from_fields(ViewConsistency, "self_distill_args", {"weight": kl_weight, **rest}),
        from_fields(Control, "self_distill_args", control) if control.get("kind") is not None else None,
    )
