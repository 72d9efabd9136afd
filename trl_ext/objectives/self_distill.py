"""objective="self-distill": RPSD."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_patch.distillation import LongCE, ViewConsistency, ViewDistiller, WeightedDistiller
from rope_patch.distillation.two_views import Labelled, ViewTape
from rope_patch.views import Skip

from .base import Objective, from_fields

if TYPE_CHECKING:
    from ..config import RopeSFTConfig


class SelfDistillObjective(Objective):
    """Next-token loss under true positions, and the KL of the sampled view's predictions to those.

    loss = (sum of cross-entropies) / labels of the step + kl_weight L_KL, with L_KL as in
    `rope_patch.distillation.ViewConsistency` over the documents of the optimizer step. Evaluation gives the
    cross-entropy alone, and logs the KL beside it.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6.
    """

    distiller: ViewDistiller

    def _make_distiller(self, model: nn.Module) -> ViewDistiller:
        consistency = self_distill_options(self.args.kl_weight, self.args._options("self_distill_args"))
        return ViewDistiller(model, consistency, longce_options(self.args))

    def counts(self, batch: dict[str, Any]) -> dict[str, int]:
        """Real tokens, labels, documents, and the sum of L - s that the clock's draws give."""
        labelled = Labelled.of(batch)
        counts = {"tokens": int(labelled.valid.sum()), "labels": labelled.n_labels, "documents": labelled.n_documents}
        if self.distiller.consistency.reduction == "token":
            counts["suffix"] = labelled.suffix_total(self.distiller.affected_from(labelled))
        return counts

    def _kl_divisor(self, counts: dict[str, int]) -> int:
        return max(1, counts["suffix" if self.distiller.consistency.reduction == "token" else "documents"])

    def _tape(self, inputs: dict[str, Any], counts: dict[str, int]) -> ViewTape:
        return ViewTape(Labelled.of(inputs), counts["labels"], self._kl_divisor(counts), inputs["input_ids"])

    def _combine(
        self, tape: ViewTape, counts: dict[str, int], own: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows, n_labels = tape.rows, max(own["labels"], 1)
        ce = rows.ce.sum() / n_labels
        share = 1.0 / tape.suffix_length.flatten()[tape.queries].clamp(min=1)
        weighted = rows.kl * share if self.distiller.consistency.reduction == "sequence" else rows.kl
        training = self.distiller.decoder.training
        parts = {
            **_weights(tape),
            "entropy": rows.entropy.sum() / n_labels,
            "mean_token_accuracy": rows.is_top1.sum() / n_labels,
        }
        if self.distiller.consistency.weight or not training:  # else no KL was computed
            parts |= {"kl": weighted.sum() / self._kl_divisor(own), **self._by_depth(tape), **self._by_skip(tape)}
        return (tape.loss, {"ce": ce, **parts}) if training else (ce, parts)

    def _by_depth(self, tape: ViewTape) -> dict[str, torch.Tensor]:
        """Mean KL of the queries in each quarter of their document."""
        labelled = tape.labelled
        length = labelled.documents.length.expand_as(labelled.t)
        return _by_quarter("kl/depth", tape, labelled.t, length)

    def _by_skip(self, tape: ViewTape) -> dict[str, torch.Tensor]:
        """Mean KL by how far the view moves the suffix, in quarters of the largest skip that it draws."""
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


class WeightedObjective(Objective):
    """Next-token loss of the sampled view with LongCE's token weights: objective="clm", token_weighting="longce".

    loss = (sum over labels of w CE) / labels of the step. Evaluation gives the plain cross-entropy.

    Source: LongCE, arXiv:2410.23771.
    """

    distiller: WeightedDistiller

    def _make_distiller(self, model: nn.Module) -> WeightedDistiller:
        longce = longce_options(self.args)
        assert longce is not None
        return WeightedDistiller(model, longce)

    def counts(self, batch: dict[str, Any]) -> dict[str, int]:
        """Real tokens and labels."""
        labelled = Labelled.of(batch)
        return {"tokens": int(labelled.valid.sum()), "labels": labelled.n_labels}

    def _tape(self, inputs: dict[str, Any], counts: dict[str, int]) -> ViewTape:
        return ViewTape(Labelled.of(inputs), counts["labels"], 1, inputs["input_ids"])

    def _combine(
        self, tape: ViewTape, counts: dict[str, int], own: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows, n_labels = tape.rows, max(own["labels"], 1)
        ce = rows.ce.sum() / n_labels
        parts = {
            **_weights(tape),
            "entropy": rows.entropy.sum() / n_labels,
            "mean_token_accuracy": rows.is_top1.sum() / n_labels,
        }
        return (tape.loss, {"ce": ce, **parts}) if self.distiller.decoder.training else (ce, parts)


def _weights(tape: ViewTape) -> dict[str, torch.Tensor]:
    return {} if tape.reference is None else {"token_weight": tape.rows.ce_factor.mean()}


def longce_options(args: "RopeSFTConfig") -> LongCE | None:
    """The token weights that `args` asks for.

    Raises:
        ValueError: an unknown weighting or option, or one out of its range.
    """
    options = args._options("longce_args")
    if args.token_weighting is None:
        if options:
            raise ValueError(f"longce_args belongs to token_weighting='longce', got longce_args={options}.")
        return None
    if args.token_weighting != "longce":
        raise ValueError(f"token_weighting must be 'longce' or None, got {args.token_weighting!r}.")
    return from_fields(LongCE, "longce_args", options)


def self_distill_options(kl_weight: float, self_distill_args: dict[str, Any]) -> ViewConsistency:
    """The options of the objective, checked.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    if "weight" in self_distill_args:
        raise ValueError("self_distill_args has no weight: give kl_weight.")
    return from_fields(ViewConsistency, "self_distill_args", {"weight": kl_weight, **self_distill_args})
