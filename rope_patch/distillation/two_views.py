"""Self-distillation between views: a model's predictions under true positions teach those under a view."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..limits import why_no_self_distillation, why_two_passes
from ..patch import rope_view
from ..rotary import parameter_names
from ..state import Batch, BoundView, TableSource, ViewSource
from ..views import Standard
from .consistency import ConsistencyDistiller, ViewConsistency, ViewTape
from .distiller import TAPE, require
from .labelled import Labelled
from .longce import LongCE
from .one_pass import TwoViewLayout
from .teacher import CopiedTeacher, SharedTeacher, without_gradient
from .two_view_attention import TwoViewAttention, copy_granule

logger = logging.get_logger(__name__)


class ViewDistiller(ConsistencyDistiller):
    """Distils the standard view of a model into its sampled view, in one call of the model.

    Where it is exact, one forward gives both views (`one_pass`); elsewhere the standard view's forward runs first, with
    its graph, then the view's. Gradients of the KL flow through all of the view's path either way, the keys and values
    of its unchanged prefix included.

    Args:
        model: patched with a view, bare or wrapped.
        consistency: rows, divisors and direction.
        longce: token weights of the cross-entropy, or None.
        teacher: the model as it was pretrained, in the same weights with adapters off or as a copy, which is then
            what the view is compared with, in all rows; None takes the standard view of the model itself.
        one_pass: whether one forward may give both views.

    Raises:
        ValueError: the model has no view that perturbs, or one that a checkpointed layer would not repeat.
    """

    def __init__(
        self,
        model: nn.Module,
        consistency: ViewConsistency,
        longce: LongCE | None = None,
        *,
        teacher: SharedTeacher | CopiedTeacher | None = None,
        one_pass: bool = True,
    ) -> None:
        super().__init__(model, consistency, longce, teacher)
        if self.state is None or self.state.source is None or (teacher is None and not self.state.source.view.perturbs):
            raise ValueError(
                "objective 'self-distill' compares a view with true positions: give view='skip' or another that "
                "perturbs. With teacher='native' and a rescaled model, view='standard' does too."
            )
        require(why_no_self_distillation(self.core, self.decoder))
        self.source = self.state.source
        try:
            self.source.view.affected_share(torch.ones(1, 1, dtype=torch.int64), torch.full((1, 1), 2))
            self._knows_share = True
        except ValueError:
            self._knows_share = False
            if consistency.reduction == "uniform" and teacher is None:
                raise
        reason = why_two_passes(self.core, self.decoder) if one_pass else "been asked for it"
        if self.source.view.layerwise or self.source.view.rescales:
            reason = "a view that differs by layer or rescales frequencies"
        self.one_pass = reason is None
        self._parameters = parameter_names(self.decoder)
        if not consistency.weight and not consistency.view_clm:
            logger.info("The view weighs nothing: training runs true positions alone, and evaluation measures the KL.")
        elif reason is None:
            logger.info("Both views run in one forward.")
        else:
            logger.warning(f"Both views run, in two passes instead of one: the model has {reason}.")

    def check_length(self, length: int) -> None:
        """Raise ValueError if documents of `length` tokens are more than the native teacher's window, if it teaches."""
        if self.teacher is not None:
            self.require_taught_length("teacher='native'", length)

    def can_differ(self, last: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if self.teacher is not None:
            return super().can_differ(last, length)
        view = self.source.view
        changes = view.can_change(length) & (last >= 1)  # query 0 sees itself alone
        # how often a query lies behind the first changed token rises with it: the last one says whether any ever does
        return changes & (view.affected_share(last, length) > 0) if self._knows_share else changes

    def affected_from(self, labelled: Labelled) -> torch.Tensor:
        """The s that the clock's next draw gives each document; 0 against another model."""
        if self.teacher is not None:
            return torch.zeros_like(labelled.documents.length)
        return self._next_first(labelled)

    def copies(self, labelled: Labelled) -> float:
        """Tokens that one forward runs once more under the clock's next draw, over all of a row, of the row with most.

        1 where the views take two forwards.
        """
        if not self.one_pass:
            return 1.0
        moved = labelled.valid & (labelled.t >= self._next_first(labelled))
        return int(moved.sum(1).max()) / labelled.t.shape[1]

    def _next_first(self, labelled: Labelled) -> torch.Tensor:
        """The first token of each document that the clock's next draw moves."""
        documents = labelled.documents
        key = self.source.clock.key(documents)
        view = self.source.view
        bound = BoundView(view, documents, view.draw_for(labelled.ids, labelled.drawn_at, documents, key))
        return bound.affected_from(labelled.drawn_at, self.decoder.config.num_hidden_layers)

    def _before_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = kwargs.get(TAPE)
        if tape is None or tape.teaching or tape.taught:
            return None
        self._read_short(tape, decoder)
        if not self.compares:
            tape.taught = True
            return None
        self._ask_teacher(tape, args, kwargs)
        call = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        # masks finished by the model around the decoder may show more than causality, as between parts of an image
        finished = call.get("attention_mask") is not None and not _is_padding_mask(call["attention_mask"])
        if self.one_pass and not finished:
            tape.taught = True
            return (), self._with_copies(tape, call)
        if self.one_pass:
            logger.warning_once("Both views run in two passes: the model around the decoder gives it finished masks.")
        tape.teaching = True
        try:
            with rope_view(decoder, "standard"):
                tape.standard = decoder(*args, **kwargs).last_hidden_state
        finally:
            tape.teaching = False
        tape.taught = True
        return None

    def _ask_teacher(self, tape: ViewTape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hidden states of the teacher, if there is one, on the tape."""
        if self.teacher is None:
            return
        self.check_length(int(tape.labelled.documents.length.max()))
        tape.teaching = True
        try:
            with without_gradient(tape.valid.device.type), self.teacher.ready() as teacher:
                tape.native = teacher(*args, **kwargs).last_hidden_state
        finally:
            tape.teaching = False

    def _with_copies(self, tape: ViewTape, call: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the decoder with copies of the suffixes, whose RoPE indices are the view's."""
        assert self.state is not None
        one, (n_rows, seq_len) = tape.labelled, tape.ids.shape
        position_ids = call.get("position_ids")
        bound = self.source.bind(
            Batch(
                rows=n_rows,
                seq_len=seq_len,
                device=tape.ids.device,
                position_ids=position_ids,
                attention_mask=call.get("attention_mask"),
                cached=0,
                training=self.decoder.training,
                ids=tape.ids,
            )
        )
        positions = torch.arange(seq_len, device=tape.ids.device) if position_ids is None else position_ids
        positions = positions.expand(n_rows, seq_len)
        layout = TwoViewLayout.of(one, self._first(one), copy_granule(self.core, seq_len))
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
        return {
            # tokens, embeddings, and whatever else a family computes for each token outside its decoder
            **{name: layout.with_copies(x) if _is_per_token(x, n_rows, seq_len) else x for name, x in call.items()},
            "attention_mask": unused,
            # true ones: some families scale queries by them
            "position_ids": layout.with_copies(positions),
            "use_cache": False,
        }

    @contextmanager
    def _watching(self) -> Iterator[None]:
        assert self.state is not None
        forced = not self.decoder.training and self.state.when == "train"  # evaluation samples no view by itself
        n_before = len(self.state.overrides)
        if forced:
            self.state.overrides.append(self.source)
        elif not self.compares:
            self.state.overrides.append(ViewSource(Standard(), 0))
        try:
            yield
        finally:
            while len(self.state.overrides) > n_before:  # also what a forward that raised has left
                self.state.overrides.pop()

    def _first(self, labelled: Labelled) -> torch.Tensor:
        if self.source.last is None:  # a standard view passes them through
            raise ValueError(
                "objective 'self-distill' looks for the first token that the view moves, and positions with several "
                "axes (mRoPE, with images) have no view: use 'hidden-distill' or 'relation-distill' without a view."
            )
        return self.source.last.affected_from(labelled.drawn_at, self.decoder.config.num_hidden_layers)

    def _share(self, labelled: Labelled) -> torch.Tensor:
        if self.teacher is not None:
            return super()._share(labelled)
        return self.source.view.affected_share(labelled.t, labelled.documents.length)

    def _states(self, tape: ViewTape, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(tape.attention, TwoViewAttention):
            return super()._states(tape, hidden)
        assert self.state is not None
        self.state.overrides.pop()
        if not tape.attended:
            raise ValueError(
                f"{type(self.core).__name__} does not call its attention through Transformers' table with the keyword "
                "arguments that it gets, so one forward cannot give both views: ask for two passes, "
                "self_distill_args={'passes': 'two'}."
            )
        rows, tokens = tape.queries // tape.ids.shape[1], tape.queries % tape.ids.shape[1]
        return hidden[rows, tokens], hidden[rows, tape.attention.layout.seen[rows, tokens]]


def _is_padding_mask(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.ndim == 2


def _is_per_token(value: Any, n_rows: int, seq_len: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[:2] == (n_rows, seq_len)
