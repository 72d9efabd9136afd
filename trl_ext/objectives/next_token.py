"""Next-token training whose tokens differ in weight: objective="clm" with token_weighting="longce" or a cue_weight."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_kernels.vocabulary.checks import IGNORE_INDEX
from rope_patch.checked_numbers import require_number
from rope_patch.distillation import CueWeight, LongCE, WeightedDistiller
from rope_patch.distillation.consistency import ViewTape
from rope_patch.distillation.distiller import Distiller
from rope_patch.distillation.labelled import Labelled

from ..step_means import Part
from .base import Objective, from_fields

if TYPE_CHECKING:
    from ..config import RopeSFTConfig


class NextTokenObjective(Objective):
    """Next-token loss of the sampled view with weights of tokens: LongCE's, EndPrompt's or both.

    loss = (sum over labels of w CE) / labels of the step. Evaluation gives the plain cross-entropy. Both are logged,
    the plain one as `ce` and that of the loss as `weighted_ce`.

    Source: LongCE, arXiv:2410.23771; EndPrompt.
    """

    distiller: Any

    def _make_distiller(self, model: nn.Module) -> Distiller:
        return WeightedDistiller(model, longce_options(self.args), cue_options(self.args))

    def read(self, batch: dict[str, Any]) -> Labelled:
        """Labels and documents."""
        return Labelled.of(batch)

    def counts(self, read: Labelled) -> dict[str, int]:
        """Real tokens and labels."""
        return {"tokens": int(read.valid.sum()), "labels": read.n_labels}

    def _kl_divisor(self, counts: dict[str, int]) -> int:
        return 1  # there is no KL

    def _tape(self, inputs: dict[str, Any], read: Labelled, counts: dict[str, int]) -> ViewTape:
        return ViewTape(read, counts["labels"], self._kl_divisor(counts), inputs["input_ids"])

    def _combine(
        self, tape: ViewTape, counts: dict[str, int], own: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        parts = self._parts(tape, own)
        if self.distiller.decoder.training:
            return tape.loss, parts
        total, _ = parts["ce"]
        return (total / own["labels"]).to(tape.loss.dtype), parts  # nan, as TRL's, for a batch without labels

    def _parts(self, tape: ViewTape, own: dict[str, int]) -> dict[str, Part]:
        rows, n_labels = tape.rows, own["labels"]
        sums = {"ce": rows.ce, "entropy": rows.entropy, "mean_token_accuracy": rows.is_top1}
        if self.distiller.decoder.training and self._weighs_tokens:
            labelled = tape.labelled.next_label.flatten()[tape.queries] != IGNORE_INDEX
            factor = torch.where(labelled, rows.ce_factor * self._cue_factors(tape), 0.0)
            sums |= {"token_weight": factor, "weighted_ce": factor * rows.ce}
        return {name: (values.double().sum(), n_labels) for name, values in sums.items()}

    @property
    def _weighs_tokens(self) -> bool:
        return self.distiller.longce is not None or self._cue is not None

    @property
    def _cue(self) -> CueWeight | None:
        return self.distiller.cue if isinstance(self.distiller, WeightedDistiller) else None

    def _cue_factors(self, tape: ViewTape) -> torch.Tensor | float:
        return 1.0 if self._cue is None else self._cue.factors(tape.labelled).flatten()[tape.queries]

    def check_length(self, length: int) -> None:
        longce = self.distiller.longce
        if longce is not None:
            longce.check_length(length, "leave out token_weighting")


def cue_options(args: "RopeSFTConfig") -> CueWeight | None:
    """The weight of a cue's tokens that `args` asks for.

    Raises:
        ValueError: a weight below 0, or without a cue.
    """
    require_number("cue_weight", args.cue_weight, least=0)
    if args.cue_weight == 1.0:
        return None
    in_force = args._options("view_args").get(
        "cue_tokens", int(args.cue is not None)
    )  # known once there is a tokenizer
    tokens = in_force if args.view == "endprompt" else 0
    if not tokens or args.objective != "clm":
        raise ValueError(
            "cue_weight weighs the tokens of view='endprompt', objective='clm', with cue_tokens above 0; got "
            f"cue_weight={args.cue_weight}, view={args.view!r}, objective={args.objective!r}."
        )
    return CueWeight(tokens=tokens, weight=args.cue_weight)


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
