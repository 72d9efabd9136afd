"""Hidden states under true positions and under a view, from one forward, from two, or from two calls of the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention.two_view import TwoViewAttention, copy_granule
from ..families.attention_calls import AttentionCall
from ..forward.drawn_view import Batch
from ..forward.sources import TableSource, ViewSource
from ..forward.state import RopeState
from ..layout.labelled import Labelled
from ..layout.two_view import TwoViewLayout
from ..patch import rope_view
from ..rope.rotary import parameter_names
from .consistency import ShortContexts
from .forward_loss import Arguments, DecoderCall
from .next_token import NextTokenRequest

logger = logging.get_logger(__name__)


class StandardRequest(NextTokenRequest):
    """For the first of two calls, under true positions: the forward writes to it what the second call needs."""

    short: ShortContexts
    states: torch.Tensor | None = None  # [batch, n, H], detached


class ViewRequest(NextTokenRequest):
    """For the call that compares two views: carries a batch and its divisors, gets the loss of both views.

    Args:
        labelled: the batch.
        ce_divisor: what the sum of cross-entropies is divided by.
        kl_divisor: what the KL is divided by, the sum of `SelfDistiller.kl_count` over the step.
        earlier: the request of the first call if there are two, else None.
    """

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


@dataclass(frozen=True)
class PairedStates:
    """Last hidden states of the same tokens in two forwards, under true positions and under a view.

    Args:
        standard: under true positions, [batch, places, H]; a token's place is its own index.
        view: under the view, [batch, places, H].
        first_changed: s, the first token of each document that the view moves, in the shape of its documents.
        labelled: the batch.
        place: index in `view` of each token's state, [batch, n]; None means the token's own index.
    """

    standard: torch.Tensor
    view: torch.Tensor
    first_changed: torch.Tensor
    labelled: Labelled
    place: torch.Tensor | None = None

    def at(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both states of some tokens, [N, H] each, given their indices among the flattened tokens."""
        if self.place is None:
            return self.labelled.states(self.standard, queries), self.labelled.states(self.view, queries)
        rows, tokens = queries // self.place.shape[1], queries % self.place.shape[1]
        return self.standard[rows, tokens], self.view[rows, self.place[rows, tokens]]


Pairing = Generator[Arguments | None, Any, PairedStates]
"""An `AroundDecoder` that returns the states of both forwards."""


class Passes(ABC):
    """A way to compute the states under true positions and under the view."""

    @abstractmethod
    def pair(self, call: DecoderCall, request: ViewRequest) -> Pairing:
        """Compute both, around the forward of the call."""

    def standard(self, call: DecoderCall) -> Generator[Arguments | None, Any, torch.Tensor]:
        """Run only the call's own forward, under true positions; returns its states, [batch, n, H]."""
        output = yield None
        states: torch.Tensor = output.last_hidden_state
        return states

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

    def pair(self, call: DecoderCall, request: ViewRequest) -> Pairing:
        if request.earlier is None:
            with rope_view(call.decoder, "standard"):
                standard = call.run_before().last_hidden_state
        else:  # the states are large, so the request drops them
            standard, request.earlier.states = request.earlier.states, None
        output = yield None
        # the view's forward has made its draw, which s belongs to
        first = first_changed(self.source, request.labelled, call.decoder)
        return PairedStates(standard, output.last_hidden_state, first, request.labelled)


@dataclass(frozen=True)
class OnePass(Passes):
    """One forward over the tokens, followed by copies of those that the view moves (`TwoViewLayout`).

    A call takes two passes instead if the model passes finished 4D masks to its decoder.
    """

    causal_lm: nn.Module
    state: RopeState
    source: ViewSource

    def pair(self, call: DecoderCall, request: ViewRequest) -> Pairing:
        decoder, labelled = call.decoder, request.labelled
        named = {**dict(zip(parameter_names(decoder), call.args, strict=False)), **call.kwargs}
        position_ids, mask = named.get("position_ids"), named.get("attention_mask")
        # masks finished by the model around the decoder may show more than causality, as between parts of an image
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            logger.warning_once(
                "Both views run in two passes, because the model passes finished 4D masks to its decoder."
            )
            return (yield from TwoPasses(self.source).pair(call, request))
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
        )
        # draw before the forward: the draw decides which tokens are copied
        drawn = self.source.bind(batch)
        positions = torch.arange(seq_len, device=device) if position_ids is None else position_ids
        positions = positions.expand(n_rows, seq_len)  # true ones
        first = first_changed(self.source, labelled, decoder)
        layout = TwoViewLayout.of(labelled, first, copy_granule(self.causal_lm, seq_len))
        moved = _from_document_starts(drawn(positions), positions, labelled)
        table = TableSource(layout.index(positions, moved))  # [batch, tokens and copies]
        request.attention = TwoViewAttention(layout, self.causal_lm, decoder.config)
        self.state.overrides.append(table)  # `SelfDistiller.active` removes it if the forward raises
        output = yield (), _with_copies(named, layout, positions)
        self.state.overrides.remove(table)
        if not request.attended:
            raise ValueError(
                f"{type(self.causal_lm).__name__} does not call its attention through Transformers' table with the "
                "keyword arguments that it gets, so one forward cannot give both views: choose two passes, "
                "objective_args={'passes': 'two'}."
            )
        return PairedStates(output.last_hidden_state, output.last_hidden_state, first, labelled, layout.seen)


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
