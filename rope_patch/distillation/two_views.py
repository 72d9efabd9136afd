"""Self-distillation between views: a model's predictions under true positions teach those under a view."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers.utils import logging

from rope_kernels import RowMetrics
from rope_kernels.linear_ce import IGNORE_INDEX

from ..attention_calls import AttentionCall
from ..heads import head_losses
from ..patch import rope_view
from ..state import Batch, TableSource
from .distiller import TAPE, Distiller, Tape
from .labelled import Labelled, Rows
from .longce import LongCE
from .one_pass import TwoViewLayout
from .two_view_attention import TwoViewAttention, why_two_passes

logger = logging.get_logger(__name__)

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
    attention: TwoViewAttention | None = None  # of the forward in flight, where one gives both views
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
        """Attention of both views, where one forward gives both."""
        return None if self.attention is None else self.attention(call)


class ViewDistiller(Distiller):
    """Distils the standard view of a model into its sampled view, in one call of the model.

    Where it is exact, one forward gives both views (`one_pass`); elsewhere the standard view's forward runs first, with
    its graph, then the view's. Gradients of the KL flow through all of the view's path either way, the keys and values
    of its unchanged prefix included.

    Args:
        model: patched with a view, bare or wrapped.
        consistency: rows, divisors and direction.
        longce: token weights of the cross-entropy, or None.
        one_pass: whether one forward may give both views.

    Raises:
        ValueError: the model has no view that perturbs, or one that a checkpointed layer would not repeat.
    """

    def __init__(
        self, model: nn.Module, consistency: ViewConsistency, longce: LongCE | None = None, *, one_pass: bool = True
    ) -> None:
        super().__init__(model)
        self._require_difference()
        assert self.state is not None
        if self.state.source is None or not self.state.source.view.perturbs:
            raise ValueError(
                "objective 'self-distill' compares a view with true positions: give view='skip' or another that "
                "perturbs."
            )
        if self.state.layers_call_rotary:
            raise ValueError(
                f"{type(self.core).__name__} computes RoPE inside its layers, which have one view a step: objective "
                "'self-distill' needs two. Use objective='clm' with the view."
            )
        self.source = self.state.source
        self.consistency, self.longce = consistency, longce
        reason = why_two_passes(self.core, self.decoder) if one_pass else "been asked for it"
        self.one_pass = reason is None
        if reason is None:
            logger.info("Both views run in one forward.")
        else:
            logger.warning(f"Both views run, in two passes instead of one: the model has {reason}.")

    def affected_from(self, labelled: Labelled) -> torch.Tensor:
        """The s that the clock's next draw gives each document."""
        documents = labelled.documents
        parameters = self.source.view.draw(documents.length, self.source.clock.key(documents))
        return self.source.view.affected_from(documents.length, parameters)

    def _before_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = kwargs.get(TAPE)
        if tape is None or tape.teaching or tape.taught:
            return None
        if self.longce is not None and decoder.training:
            tape.reference = self.longce.reference(self.core, decoder, tape.ids, tape.labelled)
        if self.one_pass:
            tape.taught = True
            return self._with_copies(tape, args, kwargs)
        tape.teaching = True
        try:
            with rope_view(decoder, "standard"):
                tape.standard = decoder(*args, **kwargs).last_hidden_state
        finally:
            tape.teaching = False
        tape.taught = True
        return None

    def _with_copies(self, tape: ViewTape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of the decoder with copies of the suffixes, whose RoPE indices are the view's."""
        assert self.state is not None
        one, (n_rows, seq_len) = tape.labelled, tape.ids.shape
        position_ids = kwargs.get("position_ids")
        bound = self.source.bind(
            Batch(
                rows=n_rows,
                seq_len=seq_len,
                device=tape.ids.device,
                position_ids=position_ids,
                attention_mask=kwargs.get("attention_mask"),
                cached=0,
                training=self.decoder.training,
            )
        )
        positions = torch.arange(seq_len, device=tape.ids.device) if position_ids is None else position_ids
        positions = positions.expand(n_rows, seq_len)
        first = self.source.view.affected_from(one.documents.length, self.source.last.parameters)  # type: ignore[union-attr]
        layout = TwoViewLayout.of(one, first)
        tape.attention = TwoViewAttention(layout, self.core, self.decoder.config)
        moved = bound(positions)
        # a prefix may be as a whole elsewhere in the view (cyclic), which RoPE does not see: here it is where it was
        begins = one.valid & (one.t == 0)
        shift = torch.zeros(int(one.ordinal.max()) + 1, dtype=moved.dtype, device=moved.device)
        shift[one.ordinal[begins]] = (moved - positions)[begins]
        index = layout.index(positions, moved - shift[one.ordinal])
        self.state.overrides.append(TableSource(index))
        # a mask of four dimensions keeps Transformers from making one; the attention of both views has its own
        unused = torch.ones(n_rows, 1, 1, 1, dtype=torch.bool, device=tape.ids.device)
        changed = {
            "input_ids": layout.tokens(tape.ids),
            "attention_mask": unused,
            "position_ids": index.clamp(min=0).long(),
            "use_cache": False,
        }
        return args, {**kwargs, **changed}

    @contextmanager
    def _watching(self) -> Iterator[None]:
        assert self.state is not None
        forced = not self.decoder.training and self.state.when == "train"  # evaluation samples no view by itself
        n_before = len(self.state.overrides)
        if forced:
            self.state.overrides.append(self.source)
        try:
            yield
        finally:
            del self.state.overrides[n_before:]  # also what a forward that raised has left

    def _compare_student(self, tape: ViewTape, output: Any) -> None:
        assert self.source.last is not None and self.state is not None
        if tape.attention is not None:
            self.state.overrides.pop()
        labelled = tape.labelled
        first = self.source.view.affected_from(labelled.documents.length, self.source.last.parameters)
        tape.in_kl, tape.suffix_length = labelled.suffix(first, self.consistency.rows)
        # evaluation measures the KL whatever it weighs in training
        weight = self.consistency.weight if self.decoder.training else 1.0
        kl_weight = tape.in_kl * (weight / tape.kl_divisor)
        if self.consistency.reduction == "sequence":
            kl_weight = kl_weight / tape.suffix_length.clamp(min=1)
        labels = labelled.next_label.flatten()
        kl_weight = kl_weight.flatten().float()
        tape.queries = ((labels != IGNORE_INDEX) | (kl_weight != 0)).nonzero().squeeze(1)
        hidden = output.last_hidden_state
        if tape.attention is None:
            standard, view = (x.flatten(0, 1)[tape.queries] for x in (tape.standard, hidden))
            del tape.standard
        else:
            rows, tokens = tape.queries // tape.ids.shape[1], tape.queries % tape.ids.shape[1]
            standard, view = hidden[rows, tokens], hidden[rows, tape.attention.layout.seen[rows, tokens]]
        labels, kl_weight = labels[tape.queries], kl_weight[tape.queries]
        ce_weight = torch.full_like(kl_weight, 1 / tape.ce_divisor)
        options = weighting(self.longce, tape)
        n_rows = len(labels)
        if self.consistency.view_clm and self.decoder.training:
            # the view's states once more, as rows of their own that have no KL
            standard, view = torch.cat([standard, view]), torch.cat([view, view])
            labels = labels.repeat(2)
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


class WeightedDistiller(Distiller):
    """Next-token loss with LongCE's token weights, under whatever view is in force.

    Args:
        model: patched, bare or wrapped.
        longce: the weights.
    """

    def __init__(self, model: nn.Module, longce: LongCE) -> None:
        super().__init__(model)
        self.longce = longce

    def _before_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape = kwargs.get(TAPE)
        if tape is not None and not tape.taught:
            tape.taught = True
            if decoder.training:
                tape.reference = self.longce.reference(self.core, decoder, tape.ids, tape.labelled)

    def _compare_student(self, tape: ViewTape, output: Any) -> None:
        labels = tape.labelled.next_label.flatten()
        tape.queries = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        tape.loss, tape.rows = head_losses(
            self.core,
            output.last_hidden_state.flatten(0, 1)[tape.queries],
            None,
            labels[tape.queries],
            torch.full((len(tape.queries),), 1 / tape.ce_divisor, device=labels.device),
            None,
            **weighting(self.longce, tape),
        )
