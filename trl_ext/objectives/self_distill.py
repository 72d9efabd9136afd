"""objective="self-distill": RPSD."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers.utils import logging

from rope_patch import rope_view
from rope_patch.checked_numbers import require_number
from rope_patch.distillation import (
    Control,
    ControlDistiller,
    LongCE,
    SequentialDistiller,
    ViewConsistency,
    ViewDistiller,
)
from rope_patch.distillation.consistency import ViewTape
from rope_patch.distillation.labelled import Labelled
from rope_patch.distillation.sequential import SequentialTape
from rope_patch.registry import unknown
from rope_patch.views import Skip

from ..step_means import Part
from .base import from_fields
from .next_token import NextTokenObjective, longce_options

logger = logging.get_logger(__name__)
Passes = Literal["auto", "two", "sequential"]
Teacher = Literal["self", "native"]


class SelfDistillObjective(NextTokenObjective):
    """Next-token loss under true positions, and the KL of the sampled view's predictions to those.

    loss = (sum of cross-entropies) / labels of the step + kl_weight L_KL, with L_KL as in
    `rope_patch.distillation.ViewConsistency` over the documents of the optimizer step. Evaluation gives the
    cross-entropy alone, and logs the KL beside it. What is logged as `ce` and `kl` makes up the loss: it is
    ce + kl_weight kl + view_clm view_ce, with `weighted_ce` in place of ce under LongCE.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6.
    """

    distiller: ViewDistiller | ControlDistiller

    def _make_distiller(self, model: nn.Module) -> ViewDistiller | ControlDistiller:
        chosen = self_distill_options(self.args.kl_weight, self.args._options("self_distill_args"))
        longce = longce_options(self.args)
        if chosen.control is not None:
            return ControlDistiller(model, chosen.consistency, chosen.control, longce)
        teacher = self._native(model) if chosen.teacher == "native" else None
        self._max_copies = 0.0 if chosen.passes == "sequential" else chosen.max_copies or 1.0
        if self._max_copies < 1:
            if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                raise ValueError(
                    "passes='sequential' and max_copies have two backward passes a batch, DeepSpeed one: leave them "
                    "out of self_distill_args."
                )
            logger.info(
                "Views run one after the other, each with its own backward, where one forward would copy more than "
                f"{self._max_copies:.0%} of a row."
            )
            return SequentialDistiller(model, chosen.consistency, longce, teacher=teacher)
        one_pass = chosen.passes == "auto"
        return ViewDistiller(model, chosen.consistency, longce, teacher=teacher, one_pass=one_pass)

    def begin(self, step: int | None, first_document: int = 0) -> None:
        if isinstance(self.distiller, ControlDistiller):
            self.distiller.evaluation_seed = first_document

    @property
    def draws(self) -> bool:
        return self.distiller.compares

    def check_length(self, length: int) -> None:
        super().check_length(length)
        kl_longce = self.distiller.consistency.kl_longce
        if kl_longce is not None:
            kl_longce.check_length(length, "leave kl_longce out of self_distill_args")
        if isinstance(self.distiller, ViewDistiller):
            self.distiller.check_length(length)

    def check_documents(self, lengths: torch.Tensor) -> None:
        if not (self.distiller.consistency.weight or self.distiller.consistency.view_clm):
            return
        last = lengths - (2 if self.distiller.consistency.rows == "paper" else 1)
        last = torch.where(lengths > 1, last, -1)
        alike = ~self.distiller.can_differ(last, lengths)
        n_alike = int(alike.sum())
        if not n_alike:
            return
        what = "training"
        if isinstance(self.distiller, ViewDistiller) and self.distiller.teacher is None:
            what = repr(self.distiller.source.view)
        if n_alike == len(lengths):
            raise ValueError(
                f"train_dataset must have documents in which {what} can change a prediction, got {n_alike} of at most "
                f"{int(lengths.max())} tokens, in all of which the KL is 0. Give longer documents, or other view_args."
            )
        logger.warning(
            f"{n_alike} of {len(lengths)} documents, {int(lengths[alike].sum())} of {int(lengths.sum())} tokens, add "
            f"nothing to the KL and do not count in its mean: {what} can change no prediction in them."
        )

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], read: Labelled, counts: dict[str, int], own: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        if not self._one_after_the_other(read):
            return super().loss(model, inputs, read, counts, own)
        tape = SequentialTape(read, counts["labels"], self._kl_divisor(counts), inputs["input_ids"])
        # gradients of both backward passes are exchanged with the second
        with self.accelerator.no_sync(model):
            with rope_view(self.distiller.decoder, "standard"):
                first = self._call(model, inputs, tape) + tape.loss
            # counts are those of all ranks, whose gradients are averaged
            factor = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            self.accelerator.backward(first * factor)
        tie = self._call(model, inputs, tape)
        loss, parts = self._combine(tape, counts, own)
        return loss + tie + first.detach(), parts

    def _one_after_the_other(self, read: Labelled) -> bool:
        """Whether a batch runs in two calls; on all ranks if on one, which gather weights and gradients together."""
        if not isinstance(self.distiller, SequentialDistiller) or not self.distiller.decoder.training:
            return False
        if not self._max_copies:
            return True
        many = torch.tensor(float(self.distiller.copies(read) > self._max_copies), device=self.accelerator.device)
        return bool(self.accelerator.reduce(many).item())

    def counts(self, read: Labelled) -> dict[str, int]:
        """Real tokens, labels, and what the KL's sum is divided by, which may go by the clock's draws."""
        counts = super().counts(read)
        if self.distiller.compares:
            counts["compared"] = self.distiller.kl_count(read)
        return counts

    def _kl_divisor(self, counts: dict[str, int]) -> int:
        return max(1, counts.get("compared", 1))

    def _parts(self, tape: ViewTape, own: dict[str, int]) -> dict[str, Part]:
        parts = super()._parts(tape, own)
        if tape.view_ce is not None:
            parts["view_ce"] = tape.view_ce, own["labels"]
        if not self.distiller.consistency.weight and self.distiller.decoder.training:
            return parts  # no KL was computed
        parts["kl"] = (tape.rows.kl.double() * tape.kl_factor).sum(), own["compared"]
        return {**parts, **self._by_depth(tape), **self._by_skip(tape)}

    def _by_depth(self, tape: ViewTape) -> dict[str, Part]:
        """Mean KL of the queries in each quarter of their document."""
        labelled = tape.labelled
        length = labelled.documents.length.expand_as(labelled.t)
        return _by_quarter("kl/depth", tape, labelled.t, length)

    def _by_skip(self, tape: ViewTape) -> dict[str, Part]:
        """Mean KL of the queries that the view moves, by how far: in quarters of the largest skip that it draws."""
        if isinstance(self.distiller, ControlDistiller):
            return {}
        source = self.distiller.source
        assert source.last is not None
        if not isinstance(source.view, Skip) or source.view.skip is not None:
            return {}
        t = tape.labelled.t
        skip = source.view.rope_index(t, source.last.parameters) - t  # 0 in a prefix, which no quarter has
        largest = tape.labelled.documents.length.expand_as(skip)
        if source.view.max_skip is not None:
            largest = torch.full_like(skip, source.view.max_skip)
        return _by_quarter("kl/skip", tape, skip - 1, largest)


def _by_quarter(name: str, tape: ViewTape, value: torch.Tensor, end: torch.Tensor) -> dict[str, Part]:
    """KL of the queries whose value is in each quarter of [0, end), and their number."""
    quarter = (4 * value // end.clamp(min=1)).clamp(max=3).flatten()[tape.queries]
    chosen = tape.in_kl.flatten()[tape.queries]
    parts: dict[str, Part] = {}
    for i in range(4):
        here = chosen & (quarter == i)
        parts[f"{name}_{i + 1}of4"] = torch.where(here, tape.rows.kl, 0.0).sum(), here.sum()
    return parts


@dataclass(frozen=True)
class Chosen:
    """The options of the objective.

    Args:
        consistency: rows, divisors and direction.
        control: what stands in for the view, or None.
        passes: "auto" one forward for both views where that is exact, "two", or "sequential": two, each with its own
            backward, in little more memory than next-token training takes.
        max_copies: bound of memory under "auto": a batch whose draw would run more of its tokens once more, as a share
            of all, runs sequentially. None: no bound.
        teacher: "self", true positions in the model as it is, or "native", in the model as it was pretrained: adapters
            off or a frozen copy, native RoPE. All rows are then compared, s being 0.
    """

    consistency: ViewConsistency
    control: Control | None
    passes: Passes
    max_copies: float | None
    teacher: Teacher


def self_distill_options(kl_weight: float, self_distill_args: dict[str, Any]) -> Chosen:
    """The options of the objective, checked.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    rest = dict(self_distill_args)
    if "weight" in rest:
        raise ValueError("self_distill_args has no weight: give kl_weight.")
    require_number("kl_weight", kl_weight, least=0)
    names = {*(f.name for f in fields(ViewConsistency)), "passes", "max_copies", "control", "strength", "teacher"}
    names -= {"weight"}
    for name in rest:
        if name not in names:
            raise unknown("option", name, names, of="self_distill_args")
    passes, kind, teacher = rest.pop("passes", "auto"), rest.pop("control", None), rest.pop("teacher", "self")
    for name, value, allowed in (("passes", passes, Passes), ("teacher", teacher, Teacher)):
        if value not in get_args(allowed):
            raise ValueError(f"{name} in self_distill_args must be one of {get_args(allowed)}, got {value!r}.")
    max_copies = rest.pop("max_copies", None)
    if max_copies is not None:
        require_number("max_copies in self_distill_args", max_copies, below=1)
    runs_one_view = not (kl_weight or rest.get("view_clm"))
    if runs_one_view and (passes == "sequential" or max_copies is not None):
        raise ValueError(
            "passes='sequential' and max_copies in self_distill_args are of two views, and training runs one with "
            "kl_weight=0 and no view_clm: leave them out, or give one of those."
        )
    if max_copies is not None and passes != "auto":
        raise ValueError(f"max_copies in self_distill_args is for passes='auto', got passes={passes!r}: leave one out.")
    if isinstance(rest.get("kl_longce"), dict):
        rest["kl_longce"] = from_fields(LongCE, "kl_longce in self_distill_args", rest["kl_longce"])
    strength = {"strength": rest.pop("strength")} if "strength" in rest else {}
    if kind is None and strength:
        raise ValueError("strength in self_distill_args is that of a control: give control='dropout', or leave it out.")
    if kind is not None and (passes, max_copies, teacher) != ("auto", None, "self"):
        raise ValueError(
            "a control runs in two passes of the model itself: leave out passes, max_copies and teacher of "
            "self_distill_args."
        )
    return Chosen(
        from_fields(ViewConsistency, "self_distill_args", {"weight": kl_weight, **rest}),
        None if kind is None else from_fields(Control, "self_distill_args", {"kind": kind, **strength}),
        passes,
        max_copies,
        teacher,
    )
