"""Hidden states under true positions and under a view, from one forward, from two, or from two calls of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention.two_view import TwoViewAttention, copy_granule
from ..families.attention_calls import AttentionCall
from ..forward.drawn_view import Batch
from ..forward.recording import logs_of
from ..forward.sources import TableSource, ViewSource
from ..forward.state import RopeState
from ..layout.labelled import Labelled
from ..layout.two_view import TwoViewLayout
from ..patch import rope_view
from ..rope.rotary import parameter_names
from .forward_loss import Arguments, DecoderCall
from .next_token import NextTokenRequest

logger = logging.get_logger(__name__)


class StandardRequest(NextTokenRequest):
    """For the first of two calls, under true positions: the forward writes to it what the second call needs."""

    states: torch.Tensor  # [batch, n, H], detached


class ViewRequest(NextTokenRequest):
    """For the call that compares two views: carries a batch and its divisors, gets the loss of both views.

    Args:
        labelled: the batch.
        ce_divisor: what the sum of cross-entropies is divided by.
        kl_divisor: what the KL is divided by, the sum of `SelfDistiller.kl_count` over the step.
        earlier: the request of the first call if there are two, else None.
    """

    taught: torch.Tensor | None = None  # last hidden states of the teacher, [batch, n, H_t]
    standard: torch.Tensor  # those under true positions, [batch, places, H]; the place of a token is its index
    view: torch.Tensor  # those under the view, [batch, places, H]
    place: torch.Tensor | None = None  # index in `view` of each token, [batch, n]; None means its own index
    first_changed: torch.Tensor  # s, the first token of each document that the view moves, in the shape of documents

    def __init__(
        self, labelled: Labelled, ce_divisor: int, kl_divisor: int, earlier: StandardRequest | None = None
    ) -> None:
        super().__init__(labelled, ce_divisor)
        self.kl_divisor, self.earlier = kl_divisor, earlier
        self.attention: Callable[[AttentionCall], torch.Tensor] | None = None  # replaces the model's
        self.attended = False  # whether that attention was called

    def visit(self, call: AttentionCall) -> torch.Tensor | None:
        """Run `attention` in place of the model's own, if it is set."""
        if self.attention is None:
            return None
        self.attended = True
        return self.attention(call)

    def take_states(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both states of some tokens, [N, H] each, given their indices among the flattened tokens; drops the others."""
        standard, view = self.standard, self.view
        del self.standard, self.view
        if self.place is None:
            return self.labelled.states(standard, queries), self.labelled.states(view, queries)
        rows, tokens = queries // self.place.shape[1], queries % self.place.shape[1]  # [N] each
        return standard[rows, tokens], view[rows, self.place[rows, tokens]]


class Passes:
    """A way to compute the states under true positions and under the view."""

    def before(self, request: ViewRequest, call: DecoderCall) -> Arguments | None:
        """Run before the decoder's forward; returns new arguments for it, or None to keep them."""
        raise NotImplementedError

    def after(self, request: ViewRequest, output: Any) -> None:
        """Run after it: the request then has both states, and the first token that the view moves."""
        raise NotImplementedError

    def before_standard(self) -> None:
        """Run before a forward under true positions that is compared with none."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hooks and settings that stay in place while forwards run."""
        yield


@dataclass(frozen=True)
class TwoPasses(Passes):
    """The forward under true positions first, then the view's.

    Both keep their graphs, unless an earlier call of the model, with its own backward, has run the first one.
    """

    source: ViewSource
    decoder: Any

    def before(self, request: ViewRequest, call: DecoderCall) -> Arguments | None:
        if request.earlier is None:
            with rope_view(self.decoder, "standard"):
                request.standard = call.run_before().last_hidden_state
        else:  # the states are large, so the earlier request drops them
            request.standard = request.earlier.states
            del request.earlier.states
        return None

    def after(self, request: ViewRequest, output: Any) -> None:
        request.view = output.last_hidden_state
        # the view's forward has made its draw, which s belongs to
        request.first_changed = first_changed(self.source, request.labelled, self.decoder)


@dataclass(frozen=True)
class OnePass(TwoPasses):
    """One forward over the tokens, followed by copies of those that the view moves (`TwoViewLayout`).

    Two passes run instead if an earlier call has run the first, or the model passes finished 4D masks to its decoder.
    """

    causal_lm: nn.Module
    state: RopeState

    def before(self, request: ViewRequest, call: DecoderCall) -> Arguments | None:
        if request.earlier is not None:
            return super().before(request, call)
        decoder, labelled = self.decoder, request.labelled
        named = {**dict(zip(parameter_names(decoder), call.args, strict=False)), **call.kwargs}
        position_ids, mask = named.get("position_ids"), named.get("attention_mask")
        # masks finished by the model around the decoder may show more than causality, as between parts of an image
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            logger.warning_once(
                "Both views run in two passes, because the model passes finished 4D masks to its decoder."
            )
            return super().before(request, call)
        (n_rows, seq_len), device = labelled.ids.shape, labelled.ids.device
        batch = Batch(
            rows=n_rows,
            seq_len=seq_len,
            device=device,
            position_ids=position_ids,
            attention_mask=mask,
            cached=0,
            training=decoder.training,
            ids=labelled.ids,
            logs=logs_of(decoder),
        )
        # draw before the forward: the draw decides which tokens are copied
        drawn = self.source.bind(batch)
        positions = torch.arange(seq_len, device=device) if position_ids is None else position_ids
        positions = positions.expand(n_rows, seq_len)  # true ones
        request.first_changed = first_changed(self.source, labelled, decoder)
        layout = TwoViewLayout.of(labelled, request.first_changed, copy_granule(self.causal_lm, seq_len))
        moved = _from_document_starts(drawn(positions), positions, labelled)
        request.place, request.attention = layout.seen, TwoViewAttention(layout, self.causal_lm, decoder.config)
        # [batch, tokens and copies]; `SelfDistiller.active` closes it if the forward raises
        self.state.overrides.append(TableSource(layout.index(positions, moved)))
        return (), _with_copies(named, layout, positions)

    def after(self, request: ViewRequest, output: Any) -> None:
        if request.place is None:
            super().after(request, output)
            return
        self.state.overrides.pop()
        if not request.attended:
            raise ValueError(
                f"{type(self.causal_lm).__name__} does not call its attention through Transformers' table with the "
                "keyword arguments that it gets, so one forward cannot give both views: choose two passes, "
                "objective_args={'passes': 'two'}."
            )
        request.standard = request.view = output.last_hidden_state


def _from_document_starts(index: torch.Tensor, positions: torch.Tensor, labelled: Labelled) -> torch.Tensor:
    """RoPE indices of a view, [batch, n], shifted so that each document begins at its true position.

    A view may shift a whole prefix (cyclic). RoPE does not see that, but the copies share the prefix of the tokens.
    """
    begins = labelled.valid & (labelled.t == 0)  # [batch, n]
    shift = torch.zeros(int(labelled.ordinal.max()) + 1, dtype=index.dtype, device=index.device)  # [documents]
    shift[labelled.ordinal[begins]] = (index - positions)[begins]
    return index - shift[labelled.ordinal]


def _with_copies(named: dict[str, Any], layout: TwoViewLayout, positions: torch.Tensor) -> dict[str, Any]:
    """Arguments of the decoder for tokens and copies."""
    n_rows = len(positions)
    both = dict(named)
    for name, value in named.items():
        # tokens, embeddings, and anything else that a family computes per token outside its decoder
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[:2] == positions.shape:
            both[name] = layout.with_copies(value)
    # a 4D mask keeps Transformers from building one; TwoViewAttention has its own mask
    both["attention_mask"] = torch.ones(n_rows, 1, 1, 1, dtype=torch.bool, device=positions.device)
    both["position_ids"] = layout.with_copies(positions)  # true ones: some families scale queries by them
    both["use_cache"] = False
    return both


def first_changed(source: ViewSource, labelled: Labelled, decoder: Any) -> torch.Tensor:
    """s, the first token of each document that the forward's draw moves, in the shape of its documents.

    Raises:
        ValueError: no view was drawn in the forward, because its position IDs have several axes (mRoPE).
    """
    if source.last is None:  # the hooks leave mRoPE to the model
        raise ValueError(
            "objective 'self-distill' needs a view, and position IDs with several axes (mRoPE, with images) have "
            "none: use 'hidden-distill' or 'relation-distill' without a view."
        )
    return source.last.affected_from(labelled.drawn_at, decoder.config.num_hidden_layers)
