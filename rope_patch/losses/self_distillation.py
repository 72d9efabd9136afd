"""Self-distillation: a model's predictions under true positions teach those under a view, or under noise."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..families.capabilities import why_no_losses, why_no_self_distillation, why_two_passes
from ..forward.drawn_view import DrawnView
from ..forward.sources import ViewSource
from ..layout.labelled import Labelled
from ..views import Standard
from .consistency import ComparedRows, ViewConsistency, consistency_loss
from .controls import Control, NoisyPasses
from .distiller import Distiller
from .forward_loss import Arguments, DecoderCall, require
from .longce import LongCE, ShortContexts
from .next_token import NextTokenRequest, next_token_loss
from .passes import OnePass, Passes, StandardRequest, TwoPasses, ViewRequest
from .teacher import CopiedTeacher, SharedTeacher

logger = logging.get_logger(__name__)

_LOGITS_BYTES = 2**29  # of float32 logits of both views


class SelfDistiller(Distiller):
    """Distils the standard view of a model into its sampled view, in one call of the model.

    Gradients of the KL flow through all of the view's path, the keys and values of its unchanged prefix included.

    In one call of the model, a `ViewRequest` gets the whole loss. Two calls keep only one graph at a time: first a
    `StandardRequest` gets the loss under true positions, whose backward may run at once, then a `ViewRequest` made from
    it gets the rest. Gradients are the same.

    Args:
        model: patched with a view, or without one under a control; bare or wrapped.
        consistency: rows, divisors and direction.
        longce: token weights of the cross-entropy, or None.
        teacher: the pretrained model, as the same weights with adapters off or as a frozen copy. Every row of the view
            is compared with it. None compares with the standard view of the model itself.
        control: noise instead of a view, or None.
        one_pass: whether one forward may compute both views where that is exact; otherwise two run.
        source: the view, if it is another than that of `patch_model`; the caller keeps it in force.

    Raises:
        ValueError: the model has no view that perturbs, or its layers compute RoPE themselves; with a control, it has
            a view.
    """

    passes: Passes
    changes: "ViewChanges | AllChanges"

    def __init__(
        self,
        model: nn.Module,
        consistency: ViewConsistency,
        longce: LongCE | None = None,
        *,
        teacher: SharedTeacher | CopiedTeacher | None = None,
        control: Control | None = None,
        one_pass: bool = True,
        source: ViewSource | None = None,
    ) -> None:
        super().__init__(model, teacher)
        require(why_no_losses(self.causal_lm, self.decoder))
        self.consistency, self.longce = consistency, longce
        self.view: ViewSource | None = None
        source = source or (None if self.state is None else self.state.source)
        if control is not None:
            if source is not None and source.view.perturbs:
                raise ValueError("a control compares two forwards at true positions: leave view at 'standard'.")
            self.passes, self.changes = NoisyPasses(self.causal_lm, self.decoder, control), AllChanges()
            return
        if source is None or (teacher is None and not source.view.perturbs):
            raise ValueError(
                "objective 'self-distill' compares a view with true positions: give view='skip' or another that "
                "perturbs. With teacher='native' and a rescaled model, view='standard' does too."
            )
        require(why_no_self_distillation(self.causal_lm, self.decoder))
        self.view, self.passes = source, self._choose_passes(source, one_pass)
        # against a teacher every query differs, so that its share is 1
        needs_share = consistency.reduction == "uniform" and teacher is None
        self.drawn = ViewChanges.of(source, self.decoder.config.num_hidden_layers, needs_share=needs_share)
        # a teacher's predictions differ from the first token on
        self.changes = self.drawn if teacher is None else AllChanges()

    def _choose_passes(self, source: ViewSource, one_pass: bool) -> Passes:
        """One forward for both views if that is exact, else two."""
        reason = why_two_passes(self.causal_lm, self.decoder) if one_pass else "one_pass=False"
        if source.view.layerwise or source.view.rescales:
            reason = "a view that differs by layer or rescales frequencies"
        if not self.consistency.kl_weight and not self.consistency.view_clm:
            logger.info(
                "The weights of the view are 0: training runs true positions only, and evaluation measures the KL."
            )
        elif reason is None:
            logger.info("Both views run in one forward.")
        else:
            logger.warning_once(f"Both views run in two passes instead of one: the model has {reason}.")
        if reason is not None:
            return TwoPasses(source, self.decoder)
        assert self.state is not None
        return OnePass(source, self.decoder, self.causal_lm, self.state)

    @property
    def one_pass(self) -> bool:
        """Whether one forward computes both views."""
        return isinstance(self.passes, OnePass)

    @property
    def compares(self) -> bool:
        """Whether forwards run the second view: always in evaluation, in training only if its weight is above 0."""
        return not self.decoder.training or bool(self.consistency.kl_weight or self.consistency.view_clm)

    def check_length(self, length: int) -> None:
        """Raise ValueError if there is a native teacher and documents of `length` tokens exceed its context window."""
        if self.teacher is not None:
            self.require_taught_length("teacher='native'", length)

    def compared(self, labelled: Labelled) -> torch.Tensor:
        """Which documents count in the mean of the KL, bool [documents]."""
        return self.changes.can_differ(labelled.last_queries(self.consistency.rows), labelled.lengths)

    def kl_count(self, labelled: Labelled) -> int:
        """The divisor of the sum of the KL.

        For "sequence" it is the number of documents that count, for "token" the sum of their L - s under the next
        draws, for "uniform" the sum of their L.
        """
        compared = self.compared(labelled)
        if self.consistency.reduction == "sequence":
            return int(compared.sum())
        first = self.changes.next_first(labelled) if self.consistency.reduction == "token" else 0
        return labelled.suffix_total(first, compared)

    def copies(self, labelled: Labelled) -> float:
        """The largest share of a sequence's tokens that one forward runs twice under the next draw.

        It is 1 if the views take two forwards.
        """
        if not self.one_pass:
            return 1.0
        moved = labelled.valid & (labelled.t >= self.drawn.next_first(labelled))
        return int(moved.sum(1).max()) / labelled.t.shape[1]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Switch the view on in evaluation, and off in training that does not compare."""
        with self.passes.active():
            if self.view is None:
                yield
                return
            assert self.state is not None
            n_before = len(self.state.overrides)
            if not self.decoder.training and self.state.when == "train":
                self.state.overrides.append(self.view)
            elif not self.compares:
                self.state.overrides.append(ViewSource(Standard(), 0))
            try:
                yield
            finally:
                while len(self.state.overrides) > n_before:  # a forward that raised leaves more than one
                    self.state.overrides.pop()

    def before(self, request: NextTokenRequest, call: DecoderCall) -> Arguments | None:
        if not isinstance(request, ViewRequest) or not self.compares:
            request.short = self._read_short(request.labelled)
            self.passes.before_standard()
            return None
        request.short = self._read_short(request.labelled) if request.earlier is None else request.earlier.short
        if self.teacher is not None:
            self.check_length(int(request.labelled.documents.length.max()))
            request.taught = self._ask_teacher(request, call).last_hidden_state
        return self.passes.before(request, call)

    def after(self, request: NextTokenRequest, output: Any) -> None:
        if isinstance(request, ViewRequest) and self.compares:
            self._compare(request, output)
            return
        # the cross-entropy under true positions: the whole loss, or that of the first of two calls
        request.result = next_token_loss(
            self.causal_lm,
            request.labelled,
            output.last_hidden_state,
            request.ce_divisor,
            longce=self.longce,
            short_ce=request.short.ce,
            chunk_rows=self._few_rows() if isinstance(request, StandardRequest) else None,
        )
        if isinstance(request, StandardRequest):
            request.states = output.last_hidden_state.detach()

    def _compare(self, request: ViewRequest, output: Any) -> None:
        """The whole loss in one call, or the rest of it in the second of two calls."""
        labelled, training, earlier = request.labelled, self.decoder.training, request.earlier
        self.passes.after(request, output)
        taught, request.taught = request.taught, None
        first_changed = request.first_changed if taught is None else torch.zeros_like(request.first_changed)
        share = self.changes.share(labelled) if self.consistency.reduction == "uniform" else None
        rows = ComparedRows.of(
            self.consistency,
            labelled,
            first_changed,
            self.compared(labelled),
            share,
            kl_divisor=request.kl_divisor,
            training=training,
        ).held(labelled)
        # drops the states of all tokens before memory peaks in the loss
        standard, view = request.take_states(rows.queries)  # [N, H] each
        teacher = None if taught is None else (self.teacher.head, labelled.states(taught, rows.queries))
        del taught
        request.result = consistency_loss(
            self.causal_lm,
            self.consistency,
            rows,
            standard,
            view,
            ce_divisor=request.ce_divisor,
            training=training,
            teacher=teacher,
            longce=self.longce,
            short=request.short,
            earlier=None if earlier is None else earlier.result,
            chunk_rows=None if earlier is None else self._few_rows(),
        )

    def _read_short(self, labelled: Labelled) -> ShortContexts:
        """Cross-entropies in short contexts, if a weight needs them."""
        if not self.decoder.training:
            return ShortContexts()
        kl_longce, ce, kl = self.consistency.kl_longce, None, None
        if self.longce is not None:
            ce = self.longce.reference(self.causal_lm, self.decoder, labelled)
        if kl_longce is not None:
            same = self.longce is not None and replace(self.longce, cap=kl_longce.cap) == kl_longce
            kl = ce if same else kl_longce.reference(self.causal_lm, self.decoder, labelled)
        return ShortContexts(ce, kl)

    def _few_rows(self) -> int:
        """Rows of logits at a time in two calls, where gradients of all weights exist beside the logits."""
        vocabulary = self.causal_lm.get_output_embeddings().weight.shape[0]
        rows = _LOGITS_BYTES // (2 * 4 * vocabulary)  # two views, four bytes
        return max(1, rows // 128 * 128 or rows)  # a multiple of 128 where so many fit


@dataclass(frozen=True)
class AllChanges:
    """Every prediction of every document differs, as under noise or against another model."""

    def can_differ(self, last: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Which documents have a prediction, bool, given t of the last query that is compared, -1 for none."""
        return last >= 0

    def next_first(self, labelled: Labelled) -> torch.Tensor:
        """The first changed token of each document, 0, in the shape of the batch's documents."""
        return torch.zeros_like(labelled.documents.length)

    def share(self, labelled: Labelled) -> torch.Tensor:
        """Probability that t >= s for each token, 1, [batch, n]."""
        return torch.ones_like(labelled.t, dtype=torch.float64)


@dataclass(frozen=True)
class ViewChanges:
    """Which predictions the draws of a view change."""

    source: ViewSource
    n_layers: int
    knows_share: bool  # whether the view can tell how often t >= s

    @classmethod
    def of(cls, source: ViewSource, n_layers: int, *, needs_share: bool) -> "ViewChanges":
        """The changes of a view.

        Raises:
            ValueError: `needs_share`, and the view cannot tell the share.
        """
        try:
            # any query of any document: the view raises or it does not
            source.view.affected_share(torch.ones(1, 1, dtype=torch.int64), torch.full((1, 1), 2))
        except ValueError:
            if needs_share:
                raise
            return cls(source, n_layers, knows_share=False)
        return cls(source, n_layers, knows_share=True)

    def can_differ(self, last: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Whether some draw changes the prediction of a document's query `last` or of one before it.

        Args:
            last: t of the last query that is compared, int64, -1 for none.
            length: tokens of the document, in the same shape.

        Returns:
            bool in that shape.
        """
        view = self.source.view
        changes = view.can_change(length) & (last >= 1)  # query 0 sees itself alone
        # the share rises with the query, so that the last query tells whether any prediction ever changes
        return changes & (view.affected_share(last, length) > 0) if self.knows_share else changes

    def next_first(self, labelled: Labelled) -> torch.Tensor:
        """The first token of each document that the next draw moves, in the shape of the batch's documents."""
        documents, view = labelled.documents, self.source.view
        key = self.source.clock.key_of(documents, labelled.ids, labelled.drawn_at, training=True)
        draws = view.draw_for(labelled.ids, labelled.drawn_at, documents, key)
        return DrawnView(view, documents, draws).affected_from(labelled.drawn_at, self.n_layers)

    def share(self, labelled: Labelled) -> torch.Tensor:
        """Probability over draws that t >= s for each token, [batch, n]."""
        return self.source.view.affected_share(labelled.t, labelled.documents.length)
