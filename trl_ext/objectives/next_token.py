"""objective="clm": the next-token loss, TRL's own, or with weights of tokens by token_weighting or cue_weight."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from rope_kernels.vocabulary.checks import IGNORE_INDEX
from rope_patch.base import papers
from rope_patch.base.validators import require_number
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import DFT, CueWeight, LongCE, NextTokenLoss, NextTokenTape, WeightedNextToken

from ..data.cues import views_with_cues
from .base import OBJECTIVES, Objective, ObjectiveOptions, from_field
from .step_means import Part

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

_WITHOUT_LONGCE = "leave out token_weighting"


@dataclass(frozen=True, kw_only=True)
class NextTokenOptions(ObjectiveOptions):
    """Options of "clm".

    Args:
        longce: LongCE's or DFT's weights of tokens, or None.
        cue: weight of a cue's tokens, or None.
    """

    config_fields = ("token_weighting", "longce_args", "cue_weight")

    longce: LongCE | None
    cue: CueWeight | None

    @classmethod
    def of(cls, args: "RopeSFTConfig") -> Self:
        return cls(longce=longce_of(args), cue=_cue_of(args))

    @property
    def needs_teacher(self) -> bool:
        return False

    @property
    def is_trl_loss(self) -> bool:
        return not self.reads_short_contexts and self.cue is None

    @property
    def takes_dft(self) -> bool:
        return True

    @property
    def counts_every_token(self) -> bool:
        return False

    @property
    def compares_forwards(self) -> bool:
        return self.reads_short_contexts

    @property
    def reads_short_contexts(self) -> bool:
        return type(self.longce) is LongCE

    def cited(self) -> tuple[str, ...]:
        longce = (papers.LONGCE,) if self.reads_short_contexts else ()
        return longce if self.cue is None else (*longce, papers.ENDPROMPT)

    def record(self) -> dict[str, Any]:
        return {**record_of_longce(self.longce), "cue_weight": 1.0 if self.cue is None else self.cue.weight}


@OBJECTIVES.register("clm")
class NextTokenObjective(Objective):
    """Next-token loss of the sampled view with weights of tokens: LongCE's, EndPrompt's or both.

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
        return WeightedNextToken(model, self.options.longce, self.options.cue)

    def read(self, batch: dict[str, Any]) -> Labelled:
        """Labels and documents."""
        return Labelled.of(batch, self.shard)

    def counts(self, read: Labelled) -> dict[str, int]:
        """Real tokens and labels."""
        return {"tokens": int(read.valid.sum()), "labels": read.n_labels}

    def _tape(self, inputs: dict[str, Any], read: Labelled, counts: dict[str, int]) -> NextTokenTape:
        return NextTokenTape(read, counts["labels"])

    def _combine(
        self, tape: NextTokenTape, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        parts = self._parts(tape.result, tape.labelled, batch_counts)
        if self.forward_loss.decoder.training:
            return tape.result.loss, parts
        total, _ = parts["ce"]
        # nan, as TRL's, for a batch without labels
        return (total / batch_counts["labels"]).to(tape.result.loss.dtype), parts

    def _parts(self, result: NextTokenLoss, labelled: Labelled, batch_counts: dict[str, int]) -> dict[str, Part]:
        rows, n_labels = result.rows, batch_counts["labels"]
        sums = {"ce": rows.ce, "entropy": rows.entropy, "mean_token_accuracy": rows.is_top1}
        if result.token_weight is not None:
            has_label = labelled.next_label.flatten()[result.queries] != IGNORE_INDEX
            weight = torch.where(has_label, result.token_weight, 0.0)
            sums |= {"token_weight": weight, "weighted_ce": weight * rows.ce}
        return {name: (values.double().sum(), n_labels) for name, values in sums.items()}

    def check_length(self, length: int) -> None:
        if self.options.longce is not None:
            self.options.longce.check_length(length, _WITHOUT_LONGCE)


def longce_of(args: "RopeSFTConfig") -> LongCE | None:
    """The token weights that `args` asks for, by token_weighting or TRL's loss_type.

    Raises:
        ValueError: an unknown weighting or option, one out of its range, rows in which all tokens would weigh 1, or
            both at once.
    """
    if args.token_weighting is None:
        if args.longce_args:
            raise ValueError(f"longce_args belongs to token_weighting='longce', got longce_args={args.longce_args}.")
        return DFT() if args.loss_type == "dft" else None
    if args.token_weighting != "longce":
        raise ValueError(f"token_weighting must be 'longce' or None, got {args.token_weighting!r}.")
    if args.loss_type == "dft":
        raise ValueError("loss_type='dft' and token_weighting='longce' both weigh tokens: leave one of them out.")
    longce = from_field(LongCE, "longce_args", args.longce_args)
    if args.max_length is not None:
        longce.check_length(args.max_length, _WITHOUT_LONGCE)
    return longce


def record_of_longce(longce: LongCE | None) -> dict[str, Any]:
    """The fields of the config that say how tokens are weighed."""
    is_longce = type(longce) is LongCE
    return {"token_weighting": "longce", "longce_args": longce} if is_longce else {"token_weighting": None}


def _cue_of(args: "RopeSFTConfig") -> CueWeight | None:
    """The weight of a cue's tokens that `args` asks for.

    Raises:
        ValueError: a weight below 0, or without a cue.
    """
    require_number("cue_weight", args.cue_weight, least=0)
    if args.cue_weight == 1.0:
        return None
    tokens = args.make_view().cue()
    if not tokens:
        raise ValueError(
            f"cue_weight weighs the tokens of {views_with_cues()}, objective='clm', with a cue of a token or more; got "
            f"cue_weight={args.cue_weight}, view={args.view!r}, objective={args.objective!r}."
        )
    return CueWeight(tokens=tokens, weight=args.cue_weight)
