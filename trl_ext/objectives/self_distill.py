"""objective="self-distill": RPSD."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers.utils import logging

from rope_patch import rope_view
from rope_patch.base import papers
from rope_patch.base.validators import require_integer, require_number
from rope_patch.forward.state import state_of
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import (
    ConsistencyLoss,
    Control,
    NextTokenLoss,
    SelfDistiller,
    StandardRequest,
    ViewConsistency,
    ViewRequest,
)
from rope_patch.losses.controls import NoisyPasses
from rope_patch.rope.rotary import find_decoder
from rope_patch.views import View

from ..engines.sequence_ranks import SequenceRanks, gradient_factor
from .alternating import AlternatingObjective
from .base import OBJECTIVES, ActivationFactors, Objective
from .next_token import NextTokenObjective, WeighedTokens
from .relation import RelationObjective, RelationOptions
from .step_means import Part

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

logger = logging.get_logger(__name__)
Passes = Literal["auto", "two", "sequential"]
Teacher = Literal["self", "native"]


@dataclass(frozen=True, kw_only=True)
class RestoringSteps(RelationOptions):
    """Options of "relation-distill" when it replaces another objective in some steps, at true positions.

    Args:
        every: distance between those optimizer steps, at least 2.
    """

    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("every", self.every, least=2)


@dataclass(frozen=True, kw_only=True)
class SelfDistillOptions(WeighedTokens, ViewConsistency):
    """Options of "self-distill".

    Args:
        teacher: "self" is the current model at true positions; "native" is the pretrained model with native RoPE, by
            switching adapters off or by a frozen copy. With "native" all rows are compared: s is 0.
        control: noise in place of the view, e.g. `{"kind": "dropout"}`, or None.
        restore: steps that distil relations instead, e.g. `{"every": 4}`, or None.
        passes: "auto" runs one forward for both views where that is exact, "two" runs two, and "sequential" runs two
            with a backward each, in little more memory than next-token training takes.
        max_copies: limit of memory under "auto", as a share of a batch's tokens: a batch runs sequentially if its draw
            would run a larger share a second time. None: no limit.
    """

    teacher: Teacher = "self"
    control: Control | None = None
    restore: RestoringSteps | None = None
    passes: Passes = "auto"
    max_copies: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("passes", Passes), ("teacher", Teacher)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}.")
        if self.max_copies is not None:
            require_number("max_copies", self.max_copies, below=1)
        if not self.compares_in_training and (self.passes == "sequential" or self.max_copies is not None):
            raise ValueError(
                "passes='sequential' and max_copies need two forwards, and training runs one with kl_weight=0 and no "
                "view_clm: leave them out, or set kl_weight or view_clm."
            )
        if self.control is not None and (self.passes, self.max_copies, self.teacher) != ("auto", None, "self"):
            raise ValueError(
                "a control always runs two passes of the same model: leave out passes, max_copies and teacher."
            )

    def check_run(self, args: "RopeSFTConfig") -> None:
        super().check_run(args)
        view = args.make_view()
        if view.cuts is not None:
            raise ValueError(
                f"view {view.name!r} with {view.cuts} cuts rows in training alone, and {args.objective!r} evaluates "
                f"the view too: use objective='clm', or leave out {view.cuts}."
            )

    def check_length(self, length: int) -> None:
        super().check_length(length)
        if self.kl_longce is not None:
            self.kl_longce.check_length(length, "leave kl_longce out of objective_args")

    @property
    def needs_teacher(self) -> bool:
        return self.teacher == "native" or self.restore is not None

    @property
    def reads_short_contexts(self) -> bool:
        return super().reads_short_contexts or self.kl_longce is not None

    @property
    def compares_in_training(self) -> bool:
        """Whether training runs the view at all."""
        return bool(self.kl_weight or self.view_clm)

    def activation_factors(self, config: Any, moved: float = 1.0, *, shared: bool = False) -> ActivationFactors:
        # states: the last ones of both views, their rows that are compared, and gradients that the loss forms at once
        if not self.compares_in_training or self.passes == "sequential":
            return ActivationFactors(states=4.0)
        if self.passes == "two" or shared:  # ranks that share a row run both views whole
            return ActivationFactors(graphs=2.0, states=6.0)
        copies = moved if self.max_copies is None else min(moved, self.max_copies)  # more of them run in two calls
        return ActivationFactors(graphs=1.0 + copies, at_once=1.0 + copies, states=6.0)

    def cited(self) -> tuple[str, ...]:
        return (papers.RPSD, *super().cited(), *(() if self.restore is None else self.restore.cited()))

    def record(self) -> dict[str, Any]:
        memory_options = ("passes", "max_copies")
        options = {name: value for name, value in super().record().items() if name not in memory_options}
        return {**options, "restore": None if self.restore is None else self.restore.record()}


@OBJECTIVES.register("self-distill")
class SelfDistillObjective(NextTokenObjective):
    """Next-token loss under true positions, and the KL of the sampled view's predictions to those.

    loss = (sum of cross-entropies) / labels of the step + kl_weight L_KL, with L_KL as in
    `rope_patch.losses.ViewConsistency` over the documents of the optimizer step. Evaluation gives the
    cross-entropy alone, and logs the KL beside it. What is logged as `ce` and `kl` makes up the loss: it is
    ce + kl_weight kl + view_clm view_ce, with `weighted_ce` in place of ce under LongCE and `loss_type="dft"`.

    When: Take it to forget less of what is far than next-token training does, for a second reading of each row.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6.
    """

    help = "next-token cross-entropy under true positions plus the KL of the view to those"
    synonyms = ("rpsd",)
    options_class = SelfDistillOptions
    takes_view_controls = False
    options: SelfDistillOptions
    forward_loss: SelfDistiller

    @classmethod
    def build(cls, model: nn.Module, args: "RopeSFTConfig", accelerator: Accelerator) -> Objective:
        """The objective; with `restore`, LinearARD's relations replace it in every n-th step."""
        options = SelfDistillOptions.of(args)
        if options.restore is None:
            return cls(model, args, accelerator)
        state = state_of(find_decoder(model))
        if state is None or not state.rescalings:
            raise ValueError(
                "restore of objective_args restores a rescaled model: give rescale, e.g. 'yarn', or leave it out."
            )
        restore = RelationObjective(model, args, accelerator, options=options.restore)
        extend = cls(model, args, accelerator, teacher=restore.teacher)  # so that there is one copy at most
        return AlternatingObjective(extend, restore, options.restore.every)

    def _make_loss(self, model: nn.Module) -> SelfDistiller:
        options = self.options
        # share of a row above which a batch runs in two calls: 0 all do, 1 none does
        self._max_copies = 0.0 if options.passes == "sequential" else options.max_copies or 1.0
        if self._max_copies < 1:
            if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                raise ValueError(
                    "passes='sequential' and max_copies have two backward passes a batch, DeepSpeed one: use FSDP2, "
                    "which shards weights as ZeRO-3 does, or leave them out of objective_args."
                )
            logger.info(
                "Views run one after the other, each with its own backward, where one forward would copy more than "
                f"{self._max_copies:.0%} of a row."
            )
        return SelfDistiller(
            model,
            options,
            options.token_weights(self.args),
            teacher=self._native(model) if options.teacher == "native" else None,
            control=options.control,
            one_pass=options.passes != "two" and SequenceRanks.of(self.accelerator) is None,
        )

    def begin(self, step: int | None, first_document: int = 0) -> None:
        # a control has no view whose clock is set: its noise in an evaluation is keyed here
        if isinstance(self.forward_loss.passes, NoisyPasses):
            self.forward_loss.passes.evaluation_seed = first_document

    @property
    def draws(self) -> bool:
        return self.forward_loss.compares

    def check_length(self, length: int) -> None:
        super().check_length(length)
        self.forward_loss.check_length(length)

    def check_evaluation(self, length: int, view: View) -> None:
        super().check_evaluation(length, view)
        view.check_length(length)  # the KL is measured under it

    def check_documents(self, lengths: torch.Tensor) -> None:
        if not self.options.compares_in_training:
            return
        last = lengths - (2 if self.options.rows == "paper" else 1)  # index of the last query compared, [documents]
        last = torch.where(lengths > 1, last, -1)  # a document of one token has no query
        unchanged = ~self.forward_loss.changes.can_differ(last, lengths)
        n_unchanged = int(unchanged.sum())
        if not n_unchanged:
            return
        what = "training"  # with a native teacher, or noise, no view decides what changes
        if self.forward_loss.view is not None and self.forward_loss.teacher is None:
            what = repr(self.forward_loss.view.view)
        if n_unchanged == len(lengths):
            raise ValueError(
                f"train_dataset must have documents in which {what} can change a prediction, got {n_unchanged} of at "
                f"most {int(lengths.max())} tokens, in all of which the KL is 0. Give longer documents, or other "
                "view_args."
            )
        tokens = f"{int(lengths[unchanged].sum())} of {int(lengths.sum())} tokens"
        logger.warning(
            f"{n_unchanged} of {len(lengths)} documents, {tokens}, add nothing to the KL and do not count in its mean: "
            f"{what} can change no prediction in them."
        )

    def loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        read: Labelled,
        counts: dict[str, int],
        batch_counts: dict[str, int],
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        if not self._takes_two_calls(read):
            return super().loss(model, inputs, read, counts, batch_counts)
        # the second backward pass exchanges the gradients of both
        with self.accelerator.no_sync(model):
            earlier = StandardRequest(read, counts["labels"])
            with rope_view(self.forward_loss.decoder, "standard"):
                first = self._call(model, inputs, earlier) + earlier.result.loss
            # the trainer multiplies by this only what is returned
            factor = gradient_factor(self.accelerator, over_all_ranks=self.args.average_tokens_across_devices)
            self.accelerator.backward(first * factor)
        request = self._request(inputs, read, counts, earlier)
        tie = self._call(model, inputs, request)
        loss, parts = self._combine(request, counts, batch_counts)
        # `first` has its gradients; here it counts for the log alone
        return loss + tie + first.detach(), parts

    def _takes_two_calls(self, read: Labelled) -> bool:
        """Whether a batch runs in two calls: on all ranks if on one, as they gather weights and gradients together."""
        if self._max_copies == 1 or not self.forward_loss.decoder.training:
            return False
        if not self._max_copies:
            return True
        # 1 on the ranks whose rows are too many
        many = torch.tensor(float(self.forward_loss.copies(read) > self._max_copies), device=self.accelerator.device)
        return bool(self.accelerator.reduce(many).item())

    def counts(self, read: Labelled) -> dict[str, int]:
        """Real tokens, labels, and the divisor of the KL's sum, which may depend on draws."""
        counts = super().counts(read)
        if self.forward_loss.compares:  # a clock is set for the batch by now: `token` counts what its draw moves
            counts["compared"] = self.forward_loss.kl_count(read)
        return counts

    def _request(
        self, inputs: dict[str, Any], read: Labelled, counts: dict[str, int], earlier: StandardRequest | None = None
    ) -> ViewRequest:
        # no "compared" in training at true positions only, where no KL is divided
        return ViewRequest(read, counts["labels"], max(1, counts.get("compared", 1)), earlier)

    def _parts(self, result: NextTokenLoss, labelled: Labelled, batch_counts: dict[str, int]) -> dict[str, Part]:
        parts = super()._parts(result, labelled, batch_counts)
        if not isinstance(result, ConsistencyLoss):
            return parts  # training without the view
        if result.view_ce is not None:
            parts["view_ce"] = result.view_ce, batch_counts["labels"]
        if not self.options.kl_weight and self.forward_loss.decoder.training:
            return parts  # no KL was computed
        # kl_factor [N] has 1 / (L - s), or what `reduction` puts in its place, and not kl_weight
        parts["kl"] = (result.rows.kl.double() * result.kl_factor).sum(), batch_counts["compared"]
        t, length = labelled.t, labelled.documents.length
        parts |= _by_quarter("kl/depth", result, t, length.expand_as(t))  # by place in the document
        source = self.forward_loss.view
        largest = None if source is None else source.view.largest_skip(length)  # None for views that draw no skip
        if source is not None and largest is not None:
            assert source.last is not None
            skip = source.view.rope_index(t, source.last.parameters) - t  # 0 in a prefix, which no quarter has
            parts |= _by_quarter("kl/skip", result, skip - 1, largest.expand_as(skip))
        return parts


def _by_quarter(name: str, result: ConsistencyLoss, value: torch.Tensor, end: torch.Tensor) -> dict[str, Part]:
    """KL of the queries whose value is in each quarter of [0, end), both [batch, n], and their number."""
    quarter = (4 * value // end.clamp(min=1)).clamp(max=3).flatten()  # [batch * n]
    chosen = result.in_kl.flatten()
    parts: dict[str, Part] = {}
    for i in range(4):
        here = chosen & (quarter == i)  # [batch * n]; the KL has those at `queries`, [N]
        parts[f"{name}_{i + 1}of4"] = torch.where(here[result.queries], result.rows.kl, 0.0).sum(), here.sum()
    return parts
