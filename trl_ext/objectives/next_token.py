"""objective="clm": the next-token loss, TRL's own or with token weights by longce or cue_weight."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from rope_kernels.vocabulary.checks import IGNORE_INDEX
from rope_patch.base import papers
from rope_patch.base.validators import require_number
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import DFT, CueWeight, LongCE, NextTokenLoss, NextTokenRequest, WeightedNextToken

from ..data.cues import views_with_cues
from .base import OBJECTIVES, Objective, ObjectiveOptions
from .step_means import Part

if TYPE_CHECKING:
    from ..config import RopeSFTConfig


@dataclass(frozen=True, kw_only=True)
class WeighedTokens(ObjectiveOptions):
    """Options of a next-token loss.

    Args:
        longce: weighs each token's cross-entropy by how much its long context helps, e.g. `{"short_context": 4096}`;
            None gives all tokens the same weight.
    """

    takes_dft = True
    longce: LongCE | None = None

    def check_run(self, args: "RopeSFTConfig") -> None:
        if self.longce is None:
            return
        if args.loss_type == "dft":
            raise ValueError("loss_type='dft' and longce of objective_args both weigh tokens: leave one of them out.")
        if args.max_length is not None:
            self.check_length(args.max_length)

    def check_length(self, length: int) -> None:
        """Raise ValueError if longce gives the same weight to all tokens of documents of at most `length` tokens."""
        if self.longce is not None:
            self.longce.check_length(length, "leave longce out of objective_args")

    def token_weights(self, args: "RopeSFTConfig") -> LongCE | None:
        """The token weights of LongCE, or of TRL's `loss_type="dft"`."""
        return DFT() if args.loss_type == "dft" else self.longce

    @property
    def counts_every_token(self) -> bool:
        return False

    @property
    def reads_short_contexts(self) -> bool:
        return self.longce is not None

    def cited(self) -> tuple[str, ...]:
        return (papers.LONGCE,) if self.reads_short_contexts else ()


@dataclass(frozen=True, kw_only=True)
class NextTokenOptions(WeighedTokens):
    """Options of "clm".

    Args:
        cue_weight: what the cross-entropy of the tokens of a view's cue counts.
    """

    cue_weight: float = 1.0

    def __post_init__(self) -> None:
        require_number("cue_weight", self.cue_weight, least=0)

    def check_run(self, args: "RopeSFTConfig") -> None:
        super().check_run(args)
        if self.cue_weight != 1.0 and not args.make_view().cue():
            raise ValueError(
                f"cue_weight of objective_args weighs the tokens of {views_with_cues()} with a cue of a token or more, "
                f"got cue_weight={self.cue_weight}, view={args.view!r}."
            )

    @property
    def is_trl_loss(self) -> bool:
        return self.longce is None and self.cue_weight == 1.0

    @property
    def compares_forwards(self) -> bool:
        return self.reads_short_contexts

    def cited(self) -> tuple[str, ...]:
        return (*super().cited(), *(() if self.cue_weight == 1.0 else (papers.ENDPROMPT,)))


@OBJECTIVES.register("clm")
class NextTokenObjective(Objective):
    """Next-token loss under the sampled view with token weights: LongCE's, EndPrompt's or both.

    loss = (sum over labels of w CE) / labels of the step. Evaluation gives the plain cross-entropy. Both are logged,
    the plain one as `ce` and that of the loss as `weighted_ce`. Without weights the loss is TRL's own, "dft" included,
    and the trainer has no objective.

    When: Take it first: it is TRL's fine-tuning, under the view.

    Source: LongCE, arXiv:2410.23771; EndPrompt, arXiv:2605.14589.
    """

    help = "next-token cross-entropy under the sampled view"
    synonyms: ClassVar[tuple[str, ...]] = ("sft", "next-token", "ce")
    options_class: ClassVar[type[ObjectiveOptions]] = NextTokenOptions
    takes_view_controls = True
    shares_sequences = True

    def _make_loss(self, model: nn.Module) -> Any:
        weight = self.options.cue_weight
        cue = None if weight == 1.0 else CueWeight(tokens=self.args.make_view().cue(), weight=weight)
        return WeightedNextToken(model, self.options.token_weights(self.args), cue)

    def read(self, batch: dict[str, Any]) -> Labelled:
        """Labels and documents."""
        return Labelled.of(batch, self.shard)

    def counts(self, read: Labelled) -> dict[str, int]:
        """Real tokens and labels."""
        return {"tokens": int(read.valid.sum()), "labels": read.n_labels}

    def _request(self, inputs: dict[str, Any], read: Labelled, counts: dict[str, int]) -> NextTokenRequest:
        return NextTokenRequest(read, counts["labels"])

    def _combine(
        self, request: NextTokenRequest, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        parts = self._parts(request.result, request.labelled, batch_counts)
        if self.forward_loss.decoder.training:
            return request.result.loss, parts
        total, _ = parts["ce"]
        # without labels nan, which Trainer leaves out of its mean by default; TRL 1.16 gives 0 and counts it
        return (total / batch_counts["labels"]).to(request.result.loss.dtype), parts

    def _parts(self, result: NextTokenLoss, labelled: Labelled, batch_counts: dict[str, int]) -> dict[str, Part]:
        rows, n_labels = result.rows, batch_counts["labels"]  # values [N], of the N queries
        sums = {"ce": rows.ce, "entropy": rows.entropy, "mean_token_accuracy": rows.is_top1}
        if result.token_weight is not None:
            has_label = labelled.next_label.flatten()[result.queries] != IGNORE_INDEX
            # [N]; rows='query_in_suffix' of self-distillation has queries without a label, whose factor weighs nothing
            weight = torch.where(has_label, result.token_weight, 0.0)
            sums |= {"token_weight": weight, "weighted_ce": weight * rows.ce}
        return {name: (values.double().sum(), n_labels) for name, values in sums.items()}

    def check_length(self, length: int) -> None:
        self.options.check_length(length)
