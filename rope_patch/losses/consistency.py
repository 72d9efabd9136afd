"""The loss of self-distillation: which queries are compared, and their loss in one sweep over the vocabulary."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from rope_kernels import RowMetrics
from rope_kernels.vocabulary.checks import IGNORE_INDEX
from rope_kernels.vocabulary.rows import ce_factors

from ..base.validators import require_number
from ..layout.labelled import Labelled, Rows
from .heads import head_losses
from .longce import LongCE, ShortContexts, head_weights
from .next_token import NextTokenLoss

Direction = Literal["reverse", "forward", "jsd"]
Reduction = Literal["sequence", "token", "uniform"]


@dataclass(frozen=True, kw_only=True)
class ViewConsistency:
    """L = L_CLM(standard view) + view_clm L_CLM(view) + kl_weight L_KL.

    p is the view's next-token distribution, q the standard view's, held fixed.

    For a document of L tokens whose RoPE indices are true before token s,

        L_KL = mean over documents of 1 / (L - s) sum_{t=s}^{L-2} KL(p_t || q_t)

    with t the query's token. The paper's Eq. 6 sums over predicted tokens i = t + 1 from i = s on; the first of these,
    predicted from query s - 1, has a KL of 0. If only some tokens have labels, the sum and L - s count only these.

    A document counts in the mean if some draw can change a prediction that is compared. A document that ends before a
    fixed split, or has a single token or no labels, is in no sum and no divisor.

    Args:
        kl_weight: lambda. If it and view_clm are 0, training runs true positions only, and evaluation measures the KL.
        view_clm: weight of the view's own cross-entropy, with the labels and divisor of the standard view; 1 with
            kl_weight 0 is the paper's ablation "w/ CLM".
        direction: "reverse" KL(p || q), "forward" KL(q || p), or their Jensen-Shannon divergence "jsd".
        rows: "paper" as above; "query_in_suffix" adds the document's last query, which has no label.
        reduction: "sequence" as above; "token" divides the sum over all documents by the sum of their L - s; "uniform"
            divides each KL_t by the probability that t >= s over draws, and the sum by the sum of L, so that each token
            weighs the same in the mean over draws. With s uniform on 0 .. L - 1, "sequence" weighs token i by
            about ln(L / (L - i)) and "token" by i / L.
        kl_longce: LongCE's weights for the KL: w_t = min(p(x_(t+1) | all before) / p(x_(t+1) | a short context), cap)
            multiplies KL_t, so that queries that need no far token count less. None weighs all alike.
        kl_top: share of a document's queries whose KL counts, those with the largest; None for all. Divisors do not
            change, so the term gets smaller. Both options cost an extra pass of the head without gradients. kl_top is
            used in training only.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6 and its ablations; "uniform", kl_longce and kl_top are ours.
    """

    kl_weight: float = 1.0
    view_clm: float = 0.0
    direction: Direction = "reverse"
    rows: Rows = "paper"
    reduction: Reduction = "sequence"
    kl_longce: LongCE | None = None
    kl_top: float | None = None

    def __post_init__(self) -> None:
        for name in ("kl_weight", "view_clm"):
            require_number(name, getattr(self, name), least=0)
        for name, allowed in (("direction", Direction), ("rows", Rows), ("reduction", Reduction)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}.")
        if self.kl_longce is not None and not isinstance(self.kl_longce, LongCE):
            raise ValueError(f"kl_longce must hold the fields of LongCE, or be None, got {self.kl_longce!r}.")
        if self.kl_top is not None:
            require_number("kl_top", self.kl_top, below=1)


@dataclass(frozen=True)
class ComparedRows:
    """The N queries of a batch that count, and the weight of each one's KL.

    Args:
        queries: indices among the flattened tokens, [N]: those with a label, and those that are compared.
        labels: -100 for none, [N].
        document: ordinal of each query's document, [N].
        in_kl: queries that the KL sums over, bool [batch, n].
        kl_factor: factor of each KL by the reduction, without lambda and the divisor, float32 [N].
        kl_weight: weight of each KL in the loss, float32 [N].
    """

    queries: torch.Tensor
    labels: torch.Tensor
    document: torch.Tensor
    in_kl: torch.Tensor
    kl_factor: torch.Tensor
    kl_weight: torch.Tensor

    @classmethod
    def of(
        cls,
        consistency: ViewConsistency,
        labelled: Labelled,
        first_changed: torch.Tensor,
        counted: torch.Tensor,
        share: torch.Tensor | None,
        *,
        kl_divisor: int,
        training: bool,
    ) -> "ComparedRows":
        """Choose the queries.

        Args:
            consistency: rows, divisors and weight.
            labelled: the batch.
            first_changed: s of each document, in the shape of its documents.
            counted: which documents count in the mean of the KL, bool [documents].
            share: probability over draws that t >= s for each token, [batch, n]; only for "uniform".
            kl_divisor: divisor of the sum of the KL.
            training: whether the KL is multiplied by lambda; evaluation measures it with weight 1.
        """
        in_kl, suffix_length = labelled.suffix(first_changed, consistency.rows)  # [batch, n] each, L - s the latter
        in_kl = in_kl & counted[labelled.ordinal]
        weight = consistency.kl_weight if training else 1.0
        factor = in_kl.double()  # [batch, n]
        if consistency.reduction == "sequence":
            factor = factor / suffix_length.clamp(min=1)
        elif consistency.reduction == "uniform":
            assert share is not None
            factor = torch.where(in_kl, factor / share, 0.0)
        factor, labels = factor.flatten().float(), labelled.next_label.flatten()  # [batch n]
        queries = ((labels != IGNORE_INDEX) | (weight * factor != 0)).nonzero().squeeze(1)
        factor, document = factor[queries], labelled.ordinal.flatten()[queries]
        return cls(queries, labels[queries], document, in_kl, factor, factor * (weight / kl_divisor))

    def held(self, labelled: Labelled) -> "ComparedRows":
        """The rows of this rank's tokens, if ranks share a sequence."""
        if labelled.shard is None:
            return self
        here = labelled.shard.held(self.queries)
        names = ("queries", "labels", "document", "kl_factor", "kl_weight")
        return replace(self, **{name: getattr(self, name)[here] for name in names})


@dataclass(frozen=True)
class ConsistencyLoss(NextTokenLoss):
    """The loss of both views with its parts by row: loss = ce + view_clm view_ce + kl_weight kl.

    Args:
        in_kl: queries that the KL sums over, bool [batch, n].
        kl_factor: sum(kl_factor rows.kl) / divisor is the KL, [N].
        view_ce: sum of the view's own cross-entropies, with LongCE's weights if there are any; None if it is not used.
    """

    in_kl: torch.Tensor
    kl_factor: torch.Tensor
    view_ce: torch.Tensor | None


def consistency_loss(
    causal_lm: Any,
    consistency: ViewConsistency,
    rows: ComparedRows,
    standard: torch.Tensor,
    view: torch.Tensor,
    *,
    ce_divisor: int,
    training: bool,
    teacher: tuple[Any, torch.Tensor] | None = None,
    longce: LongCE | None = None,
    short: ShortContexts,
    earlier: NextTokenLoss | None = None,
    **options: Any,
) -> ConsistencyLoss:
    """Cross-entropy of the standard view, KL of the sampled view to it, and cross-entropy of the sampled view.

    Args:
        causal_lm: the model, for its head.
        consistency: weights and direction.
        rows: which rows count.
        standard: last hidden states of the rows under true positions, [N, H].
        view: last hidden states of the rows under the sampled view, [N, H].
        ce_divisor: divisor of sums of cross-entropies.
        training: whether `view_clm` and `kl_top` are used.
        teacher: output head and last hidden states of the rows in another model, [N, H_t], as target of the KL; None
            means the standard view.
        longce: token weights of the cross-entropies, or None.
        short: cross-entropies in short contexts, for `longce` and `kl_longce`.
        earlier: the standard view's cross-entropy, if an earlier call computed it; it is not in this loss then.
        **options: of `rope_kernels.linear_ce_kl`.
    """
    if short.kl is not None or consistency.kl_top is not None:
        rows = _reweighted(causal_lm, consistency, rows, standard, view, teacher, short.kl, training)
    n_rows, kl_weight = len(rows.queries), rows.kl_weight
    labels = rows.labels if earlier is None else torch.full_like(rows.labels, IGNORE_INDEX)
    ce_weight = torch.full_like(kl_weight, 1 / ce_divisor)
    longce_options = head_weights(longce, short.ce, rows.queries)
    options |= longce_options
    other, has_view_ce = view, bool(consistency.view_clm) and training
    if has_view_ce:
        # append the view's states again, as rows without a KL: all below is [2N] or [2N, H]
        standard, other = torch.cat([standard, view]), torch.cat([view, view])
        labels = torch.cat([labels, rows.labels])
        ce_weight = torch.cat([ce_weight, consistency.view_clm * ce_weight])
        kl_weight = torch.cat([kl_weight, torch.zeros_like(kl_weight)])
        teacher = teacher and (teacher[0], teacher[1].repeat(2, 1))
        options = {name: x.repeat(2) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    direction = consistency.direction
    loss, metrics = head_losses(
        causal_lm, standard, other, labels, ce_weight, kl_weight, teacher, direction=direction, **options
    )
    row_metrics = {name: x[:n_rows] for name, x in vars(metrics).items()}  # [N] each, without the appended rows
    if earlier is not None:  # it measured all but the KL, at `earlier.queries`
        for name, x in vars(earlier.rows).items():
            if name != "kl":
                whole = x.new_zeros(rows.in_kl.numel()).index_copy(0, earlier.queries, x)  # [batch n]
                row_metrics[name] = whole[rows.queries]
    view_ce = (metrics.ce_factor * metrics.ce)[n_rows:].sum() if has_view_ce else None
    token_weight = row_metrics["ce_factor"] if longce_options else None
    return ConsistencyLoss(
        loss, RowMetrics(**row_metrics), rows.queries, token_weight, rows.in_kl, rows.kl_factor, view_ce
    )


@torch.no_grad()
def _reweighted(
    causal_lm: Any,
    consistency: ViewConsistency,
    rows: ComparedRows,
    standard: torch.Tensor,
    view: torch.Tensor,
    teacher: tuple[Any, torch.Tensor] | None,
    short_ce: torch.Tensor | None,
    training: bool,
) -> ComparedRows:
    """The rows with the weights of `kl_longce`, without the KL of those that `kl_top` leaves out."""
    on = (rows.kl_weight != 0).nonzero().squeeze(1)  # [M], indices into N
    none = torch.zeros(len(on), device=on.device)  # weights: the loss is not used, only its metrics
    factor, in_kl = torch.ones_like(rows.kl_weight), rows.in_kl
    if short_ce is not None:
        assert consistency.kl_longce is not None
        _, metrics = head_losses(causal_lm, standard[on], None, rows.labels[on], none, None)
        reference = short_ce.flatten()[rows.queries[on]].to(metrics.ce.dtype)
        factor[on] = ce_factors(metrics.ce, reference, consistency.kl_longce.cap).to(factor.dtype)
    if consistency.kl_top is not None and training:
        labels = torch.full_like(on, IGNORE_INDEX)
        other = None if teacher is None else (teacher[0], teacher[1][on])
        direction = consistency.direction
        _, metrics = head_losses(causal_lm, standard[on], view[on], labels, none, none + 1, other, direction=direction)
        dropped = on[~top_share(metrics.kl, rows.document[on], consistency.kl_top)]
        factor[dropped] = 0.0
        in_kl = in_kl.flatten().index_fill(0, rows.queries[dropped], False).view_as(in_kl)
    return replace(rows, in_kl=in_kl, kl_factor=rows.kl_factor * factor, kl_weight=rows.kl_weight * factor)


def top_share(value: torch.Tensor, group: torch.Tensor, share: float) -> torch.Tensor:
    """Whether each value is among the ceil(share m) largest of the m values of its group, bool [N]."""
    order = value.argsort(descending=True, stable=True)  # [N]
    order = order[group[order].argsort(stable=True)]  # by group, descending within it
    _, counts = group[order].unique_consecutive(return_counts=True)
    # [N], in sorted order: the place within the group, 0 for its largest value
    rank = torch.arange(len(value), device=value.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    kept = torch.zeros_like(value, dtype=torch.bool)
    kept[order] = rank < (share * counts.repeat_interleave(counts)).ceil()
    return kept
