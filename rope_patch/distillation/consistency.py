"""Consistency of predictions: what is compared, row by row, and the loss of it in one sweep over the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from rope_kernels import RowMetrics
from rope_kernels.vocabulary.checks import IGNORE_INDEX
from rope_kernels.vocabulary.rows import ce_factors

from ..attention_calls import AttentionCall
from ..checked_numbers import require_number
from ..heads import head_losses
from ..limits import why_no_losses
from .distiller import Distiller, Tape, require
from .labelled import Labelled, Rows
from .longce import LongCE
from .teacher import CopiedTeacher, SharedTeacher

Direction = Literal["reverse", "forward", "jsd"]
Reduction = Literal["sequence", "token", "uniform"]


@dataclass(frozen=True, kw_only=True)
class ViewConsistency:
    """L = L_CLM(standard view) + view_clm L_CLM(view) + weight L_KL.

    p is the view's next-token distribution, q the standard view's, held fixed.

    For a document of L tokens whose RoPE indices are true before token s,

        L_KL = mean over documents of 1 / (L - s) sum_{t=s}^{L-2} KL(p_t || q_t)

    with t the query's token: the paper's Eq. 6 sums over the tokens i = t + 1 that are predicted from i = s on, and the
    first of these, predicted from query s - 1, has a KL of 0. With labels on some tokens only, the sum and L - s count
    those.

    A document counts in the mean if some draw can change a prediction that is compared. One that ends before a fixed
    split, has a single token or no labels adds nothing and is no part of any divisor.

    With weight 0 and view_clm 0 training runs true positions alone, without a second view; evaluation measures the KL.

    Args:
        weight: lambda.
        view_clm: of the view's own cross-entropy, with the labels and the divisor of the standard view's; 1 with weight
            0 is the paper's ablation "w/ CLM".
        direction: "reverse" KL(p || q), "forward" KL(q || p), or their Jensen-Shannon divergence "jsd".
        rows: "paper" as above; "query_in_suffix" adds the document's last query, which has no label.
        reduction: "sequence" as above; "token" divides the sum over all documents by the sum of their L - s; "uniform"
            divides each KL_t by the probability that t lies behind a drawn s, and the sum by the sum of L, so that each
            token weighs the same in the mean over draws. With s uniform on 0 .. L - 1, "sequence" weighs token i by
            about ln(L / (L - i)) and "token" by i / L.
        kl_longce: LongCE's weights on the rows of the KL: w_t = min(p(x_(t+1) | all before) / p(x_(t+1) | a short
            context), cap) multiplies KL_t, so that rows that need no far token, and have no reason to be held, count
            less. None weighs all alike.
        kl_top: share of a document's rows, those with the largest KL, whose KL counts; None for all. Divisors stay in
            both, so that fewer rows make a smaller term. Both look at the rows once more, without gradients, and only
            in training.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6 and its ablations; "uniform", kl_longce and kl_top are ours.
    """

    weight: float = 1.0
    view_clm: float = 0.0
    direction: Direction = "reverse"
    rows: Rows = "paper"
    reduction: Reduction = "sequence"
    kl_longce: LongCE | None = None
    kl_top: float | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "view_clm"):
            require_number(name, getattr(self, name), least=0)
        for name, allowed in (("direction", Direction), ("rows", Rows), ("reduction", Reduction)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}.")
        if self.kl_longce is not None and not isinstance(self.kl_longce, LongCE):
            raise ValueError(f"kl_longce must hold the fields of LongCE, or be None, got {self.kl_longce!r}.")
        if self.kl_top is not None:
            require_number("kl_top", self.kl_top, below=1)
        for name in ("kl_longce", "kl_top"):
            if getattr(self, name) is not None and not self.weight:
                raise ValueError(
                    f"{name} chooses rows of a KL that weighs 0, got {name}={getattr(self, name)!r}: leave it out, or "
                    "give the KL a weight above 0."
                )


class ViewTape(Tape):
    """Hidden states of the standard view, and the loss and metrics of both.

    Args:
        labelled: the batch.
        ce_divisor: what the sum of cross-entropies is divided by.
        kl_divisor: what the KL is divided by, `ConsistencyDistiller.kl_count` of all that the mean is over.
        ids: of the tokens, [batch, n].
    """

    reference: torch.Tensor | None = None  # [batch, n], cross-entropy in a short context
    kl_reference: torch.Tensor | None = None  # likewise, for the weights of the KL
    attention: Callable[[AttentionCall], torch.Tensor] | None = None  # in place of the model's
    attended = False  # whether it was called
    native: torch.Tensor | None = None  # [batch, n, H], of the teacher, where there is one
    standard: torch.Tensor
    loss: torch.Tensor
    rows: RowMetrics
    view_ce: torch.Tensor | None = None  # sum over labels, as LongCE weighs them, where it counts
    in_kl: torch.Tensor  # [batch, n], queries that the KL sums over
    suffix_length: torch.Tensor  # [batch, n], L - s
    kl_factor: torch.Tensor  # [N], what the reduction makes of the KL of each row, but for lambda and the divisor
    queries: torch.Tensor  # [N] indices of `rows` among the flattened queries

    def __init__(self, labelled: Labelled, ce_divisor: int, kl_divisor: int, ids: torch.Tensor) -> None:
        super().__init__(labelled.valid, labelled.ordinal)
        self.labelled, self.ce_divisor, self.kl_divisor, self.ids = labelled, ce_divisor, kl_divisor, ids

    def visit(self, call: AttentionCall) -> torch.Tensor | None:
        """What the forward in flight computes in place of the model's own attention."""
        if self.attention is None:
            return None
        self.attended = True
        return self.attention(call)


class ConsistencyDistiller(Distiller):
    """Distils the predictions of one forward into those of another, in one call of the model.

    Args:
        model: patched or not, bare or wrapped.
        consistency: rows, divisors and direction.
        longce: token weights of the cross-entropy, or None.
        teacher: the model as it was pretrained, whose predictions are then q; None takes the standard view's.
    """

    def __init__(
        self,
        model: nn.Module,
        consistency: ViewConsistency,
        longce: LongCE | None,
        teacher: SharedTeacher | CopiedTeacher | None = None,
    ) -> None:
        super().__init__(model, teacher)
        require(why_no_losses(self.core, self.decoder))
        self.consistency, self.longce = consistency, longce

    @property
    def compares(self) -> bool:
        """Whether a forward runs the second view: in training only where it weighs something, in evaluation always."""
        return not self.decoder.training or bool(self.consistency.weight or self.consistency.view_clm)

    def can_differ(self, last: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Whether some draw changes the prediction of a document's query `last` or of one before it.

        Args:
            last: t of the last query that is compared, int64, -1 for none.
            length: tokens of the document, in the same shape.

        Returns:
            bool in that shape.
        """
        return last >= 0

    def compared(self, labelled: Labelled) -> torch.Tensor:
        """Which documents count in the mean of the KL, bool [documents]."""
        return self.can_differ(labelled.last_queries(self.consistency.rows), labelled.lengths)

    def kl_count(self, labelled: Labelled) -> int:
        """What the sum of the KL is divided by, as its reduction has it.

        The number of documents that count, for "token" the sum of their L - s under the clock's next draws, for
        "uniform" that of their L.
        """
        compared = self.compared(labelled)
        if self.consistency.reduction == "sequence":
            return int(compared.sum())
        first = self.affected_from(labelled) if self.consistency.reduction == "token" else 0
        return labelled.suffix_total(first, compared)

    def affected_from(self, labelled: Labelled) -> torch.Tensor:
        """The s of each document, in the shape of the batch's documents, before the forward that draws it."""
        raise NotImplementedError

    def _first(self, labelled: Labelled) -> torch.Tensor:
        """The s of each document in the forward that has run."""
        raise NotImplementedError

    def _read_short(self, tape: ViewTape, decoder: Any) -> None:
        """Cross-entropies in short contexts, where something is weighed by them, on the tape."""
        if not decoder.training:
            return
        if self.longce is not None:
            tape.reference = self.longce.reference(self.core, decoder, tape.ids, tape.labelled)
        own = self.consistency.kl_longce
        if own is not None:
            same = self.longce is not None and replace(self.longce, cap=own.cap) == own
            found = tape.reference if same else own.reference(self.core, decoder, tape.ids, tape.labelled)
            tape.kl_reference = found

    @torch.no_grad()
    def _row_factors(
        self, tape: ViewTape, standard: torch.Tensor, view: torch.Tensor, kl_weight: torch.Tensor
    ) -> torch.Tensor:
        """What `kl_longce` and `kl_top` multiply each row's KL by; rows that they drop leave the tape's `in_kl`."""
        factor = torch.ones_like(kl_weight)
        on = (kl_weight != 0).nonzero().squeeze(1)
        queries = tape.queries[on]
        none = torch.zeros(len(on), device=on.device)
        if tape.kl_reference is not None:
            assert self.consistency.kl_longce is not None
            labels = tape.labelled.next_label.flatten()[queries]
            _, metrics = head_losses(self.core, standard[on], None, labels, none, None)
            reference = tape.kl_reference.flatten()[queries].to(metrics.ce.dtype)
            factor[on] = ce_factors(metrics.ce, reference, self.consistency.kl_longce.cap).to(factor.dtype)
        if self.consistency.kl_top is not None and self.decoder.training:
            direction = self.consistency.direction
            labels = torch.full_like(queries, IGNORE_INDEX)
            teacher = self._teacher_of(tape, on)
            _, metrics = head_losses(
                self.core, standard[on], view[on], labels, none, none + 1, teacher, direction=direction
            )
            kept = top_share(metrics.kl, tape.labelled.ordinal.flatten()[queries], self.consistency.kl_top)
            factor[on[~kept]] = 0.0
            tape.in_kl.view(-1)[queries[~kept]] = False
        return factor

    def _share(self, labelled: Labelled) -> torch.Tensor:
        """Probability over draws that each token lies behind s, [batch, n]."""
        return torch.ones_like(labelled.t, dtype=torch.float64)

    def _states(self, tape: ViewTape, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of `tape.queries` in the standard view and the other, given those of the last forward."""
        standard, view = (x.flatten(0, 1)[tape.queries] for x in (tape.standard, hidden))
        del tape.standard
        return standard, view

    def _compare_student(self, tape: ViewTape, output: Any) -> None:
        if not self.compares:
            self._next_token(tape, output.last_hidden_state)
            return
        kl_weight = self._choose_rows(tape)
        standard, view = self._states(tape, output.last_hidden_state)
        labels = tape.labelled.next_label.flatten()[tape.queries]
        self._sweep(tape, standard, view, labels, labels, kl_weight)

    def _next_token(self, tape: ViewTape, hidden: torch.Tensor) -> None:
        """Cross-entropy of the standard view alone, onto the tape."""
        labels = tape.labelled.next_label.flatten()
        tape.queries = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        ce_weight = torch.full((len(tape.queries),), 1 / tape.ce_divisor, device=labels.device)
        states, labels = hidden.flatten(0, 1)[tape.queries], labels[tape.queries]
        tape.loss, tape.rows = head_losses(self.core, states, None, labels, ce_weight, None, **self._head_options(tape))

    def _choose_rows(self, tape: ViewTape) -> torch.Tensor:
        """Which queries count, written on the tape, and what the KL of each of `tape.queries` weighs."""
        labelled = tape.labelled
        first = self._first(labelled)
        if self.teacher is not None:
            first = torch.zeros_like(first)  # another model differs from the first row on
        tape.in_kl, tape.suffix_length = labelled.suffix(first, self.consistency.rows)
        tape.in_kl = tape.in_kl & self.compared(labelled)[labelled.ordinal]
        # evaluation measures the KL whatever it weighs in training
        weight = self.consistency.weight if self.decoder.training else 1.0
        factor = tape.in_kl.double()
        if self.consistency.reduction == "sequence":
            factor = factor / tape.suffix_length.clamp(min=1)
        elif self.consistency.reduction == "uniform":
            factor = torch.where(tape.in_kl, factor / self._share(labelled), 0.0)
        factor = factor.flatten().float()
        counts = (labelled.next_label.flatten() != IGNORE_INDEX) | (weight * factor != 0)
        tape.queries = counts.nonzero().squeeze(1)
        tape.kl_factor = factor[tape.queries]
        return tape.kl_factor * (weight / tape.kl_divisor)

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
        if tape.kl_reference is not None or self.consistency.kl_top is not None:
            factor = self._row_factors(tape, standard, view, kl_weight)
            kl_weight, tape.kl_factor = kl_weight * factor, tape.kl_factor * factor
        options = self._head_options(tape)
        n_rows = len(labels)
        teacher, other = self._teacher_of(tape, slice(None)), view
        if self.consistency.view_clm and self.decoder.training:
            # the view's states once more, as rows of their own that have no KL
            standard, other = torch.cat([standard, view]), torch.cat([view, view])
            labels = torch.cat([labels, view_labels])
            ce_weight = torch.cat([ce_weight, self.consistency.view_clm * ce_weight])
            kl_weight = torch.cat([kl_weight, torch.zeros_like(kl_weight)])
            teacher = teacher and (teacher[0], teacher[1].repeat(2, 1))
            options = {name: x.repeat(2) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        tape.loss, metrics = head_losses(
            self.core,
            standard,
            other,
            labels,
            ce_weight,
            kl_weight,
            teacher,
            direction=self.consistency.direction,
            **options,
        )
        tape.native = None
        tape.rows = RowMetrics(*(x[:n_rows] for x in vars(metrics).values()))
        if len(labels) > n_rows:
            tape.view_ce = (metrics.ce_factor * metrics.ce)[n_rows:].sum()

    def _head_options(self, tape: ViewTape) -> dict[str, Any]:
        """What `linear_ce_kl` is to know besides rows and their weights."""
        return weighting(self.longce, tape)

    def _teacher_of(self, tape: ViewTape, rows: torch.Tensor | slice) -> tuple[Any, torch.Tensor] | None:
        """The teacher's head and hidden states for some of `tape.queries`, None without a teacher."""
        if self.teacher is None:
            return None
        assert tape.native is not None
        return self.teacher.head, tape.native.flatten(0, 1)[tape.queries[rows]]


def top_share(value: torch.Tensor, group: torch.Tensor, share: float) -> torch.Tensor:
    """Which values are among the ceil(share m) largest of the m of their group, bool [N], given [N] each."""
    order = value.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]  # by group, and falling within
    _, counts = group[order].unique_consecutive(return_counts=True)
    rank = torch.arange(len(value), device=value.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    kept = torch.zeros_like(value, dtype=torch.bool)
    kept[order] = rank < (share * counts.repeat_interleave(counts)).ceil()
    return kept


def weighting(longce: LongCE | None, tape: ViewTape) -> dict[str, Any]:
    """What `linear_ce_kl` is to know of token weights."""
    if longce is None or tape.reference is None:
        return {}
    return {"ce_reference": tape.reference.flatten()[tape.queries], "ce_cap": longce.cap}
