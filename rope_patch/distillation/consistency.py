"""Consistency of predictions: what is compared, row by row, and the loss of it in one sweep over the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from rope_kernels import RowMetrics
from rope_kernels.linear_ce import IGNORE_INDEX

from ..attention_calls import AttentionCall
from ..heads import head_losses
from ..limits import why_no_head
from .distiller import Distiller, Tape, require
from .labelled import Labelled, Rows
from .longce import LongCE

Direction = Literal["reverse", "forward", "jsd"]
Reduction = Literal["sequence", "token"]


@dataclass(frozen=True, kw_only=True)
class ViewConsistency:
    """L = L_CLM(standard view) + view_clm L_CLM(view) + weight L_KL.

    p is the view's next-token distribution, q the standard view's, held fixed.

    For a document of L tokens whose RoPE indices are true before token s,

        L_KL = mean over documents of 1 / (L - s) sum_{t=s}^{L-2} KL(p_t || q_t)

    with t the query's token: the paper's Eq. 6 sums over the tokens i = t + 1 that are predicted from i = s on, and the
    first of these, predicted from query s - 1, has a KL of 0. With labels on some tokens only, the sum and L - s count
    those.

    Args:
        weight: lambda.
        view_clm: of the view's own cross-entropy, with the labels and the divisor of the standard view's; 1 with weight
            0 is the paper's ablation "w/ CLM".
        direction: "reverse" KL(p || q), "forward" KL(q || p), or their Jensen-Shannon divergence "jsd".
        rows: "paper" as above; "query_in_suffix" adds the document's last query, which has no label.
        reduction: "sequence" as above; "token" divides the sum over all documents by the sum of their L - s.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6 and its ablations.
    """

    weight: float = 1.0
    view_clm: float = 0.0
    direction: Direction = "reverse"
    rows: Rows = "paper"
    reduction: Reduction = "sequence"

    def __post_init__(self) -> None:
        for name in ("weight", "view_clm"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)!r}.")
        for name, allowed in (("direction", Direction), ("rows", Rows), ("reduction", Reduction)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}.")


class ViewTape(Tape):
    """Hidden states of the standard view, and the loss and metrics of both.

    Args:
        labelled: the batch.
        ce_divisor: what the sum of cross-entropies is divided by.
        kl_divisor: what the KL is divided by: documents, or the sum of L - s for the "token" reduction.
        ids: of the tokens, [batch, n].
    """

    reference: torch.Tensor | None = None  # [batch, n], cross-entropy in a short context
    attention: Callable[[AttentionCall], torch.Tensor] | None = None  # in place of the model's
    standard: torch.Tensor
    loss: torch.Tensor
    rows: RowMetrics
    view_ce: torch.Tensor | None = None  # sum over labels, where it counts
    in_kl: torch.Tensor  # [batch, n], queries that the KL sums over
    suffix_length: torch.Tensor  # [batch, n], L - s
    queries: torch.Tensor  # [N] indices of `rows` among the flattened queries

    def __init__(self, labelled: Labelled, ce_divisor: int, kl_divisor: int, ids: torch.Tensor) -> None:
        super().__init__(labelled.valid, labelled.ordinal)
        self.labelled, self.ce_divisor, self.kl_divisor, self.ids = labelled, ce_divisor, kl_divisor, ids

    def visit(self, call: AttentionCall) -> torch.Tensor | None:
        """What the forward in flight computes in place of the model's own attention."""
        return None if self.attention is None else self.attention(call)


class ConsistencyDistiller(Distiller):
    """Distils the predictions of one forward into those of another, in one call of the model.

    Args:
        model: patched or not, bare or wrapped.
        consistency: rows, divisors and direction.
        longce: token weights of the cross-entropy, or None.
    """

    def __init__(self, model: nn.Module, consistency: ViewConsistency, longce: LongCE | None) -> None:
        super().__init__(model)
        require(why_no_head(self.core, self.decoder))
        self.consistency, self.longce = consistency, longce

    def affected_from(self, labelled: Labelled) -> torch.Tensor:
        """The s of each document, in the shape of the batch's documents, before the forward that draws it."""
        raise NotImplementedError

    def _first(self, labelled: Labelled) -> torch.Tensor:
        """The s of each document in the forward that has run."""
        raise NotImplementedError

    def _states(self, tape: ViewTape, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of `tape.queries` in the standard view and the other, given those of the last forward."""
        standard, view = (x.flatten(0, 1)[tape.queries] for x in (tape.standard, hidden))
        del tape.standard
        return standard, view

    def _compare_student(self, tape: ViewTape, output: Any) -> None:
        kl_weight = self._choose_rows(tape)
        standard, view = self._states(tape, output.last_hidden_state)
        labels = tape.labelled.next_label.flatten()[tape.queries]
        self._sweep(tape, standard, view, labels, labels, kl_weight)

    def _choose_rows(self, tape: ViewTape) -> torch.Tensor:
        """Which queries count, written on the tape, and what the KL of each of `tape.queries` weighs."""
        labelled = tape.labelled
        tape.in_kl, tape.suffix_length = labelled.suffix(self._first(labelled), self.consistency.rows)
        # evaluation measures the KL whatever it weighs in training
        weight = self.consistency.weight if self.decoder.training else 1.0
        kl_weight = tape.in_kl * (weight / tape.kl_divisor)
        if self.consistency.reduction == "sequence":
            kl_weight = kl_weight / tape.suffix_length.clamp(min=1)
        kl_weight = kl_weight.flatten().float()
        tape.queries = ((labelled.next_label.flatten() != IGNORE_INDEX) | (kl_weight != 0)).nonzero().squeeze(1)
        return kl_weight[tape.queries]

    def _sweep(
        self,
        tape: ViewTape,
        standard: torch.Tensor,
        view: torch.Tensor,
        labels: torch.Tensor,
        view_labels: torch.Tensor,
        kl_weight: torch.Tensor,
    ) -> None:
        """Losses and metrics of hidden states of `tape.queries`, with labels of either view, onto the tape."""
        ce_weight = torch.full_like(kl_weight, 1 / tape.ce_divisor)
        options = weighting(self.longce, tape)
        n_rows = len(labels)
        if self.consistency.view_clm and self.decoder.training:
            # the view's states once more, as rows of their own that have no KL
            standard, view = torch.cat([standard, view]), torch.cat([view, view])
            labels = torch.cat([labels, view_labels])
            ce_weight = torch.cat([ce_weight, self.consistency.view_clm * ce_weight])
            kl_weight = torch.cat([kl_weight, torch.zeros_like(kl_weight)])
            options = {name: x.repeat(2) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        tape.loss, metrics = head_losses(
            self.core,
            standard,
            view,
            labels,
            ce_weight,
            kl_weight,
            direction=self.consistency.direction,
            **options,
        )
        tape.rows = RowMetrics(*(x[:n_rows] for x in vars(metrics).values()))
        if len(labels) > n_rows:
            tape.view_ce = metrics.ce[n_rows:].sum()


def weighting(longce: LongCE | None, tape: ViewTape) -> dict[str, Any]:
    """What `linear_ce_kl` is to know of token weights."""
    if longce is None or tape.reference is None:
        return {}
    return {"ce_reference": tape.reference.flatten()[tape.queries], "ce_cap": longce.cap}
