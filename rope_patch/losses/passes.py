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
from ..forward.drawn_view import Batch, ForwardIndex
from ..forward.sources import TableSource, ViewSource
from ..forward.state import RopeState
from ..layout.labelled import Labelled
from ..layout.two_view import TwoViewLayout
from ..patch import rope_view
from .consistency import ShortContexts
from .forward_loss import Arguments, DecoderCall
from .next_token import NextTokenRequest

logger = logging.get_logger(__name__)


class StandardRequest(NextTokenRequest):
    """For the first of two calls, under true positions: the forward writes to it what the second call needs.

    Args:
        labelled: the batch.
        ce_divisor: what the sum of cross-entropies is divided by.
    """

    short: ShortContexts
    states: torch.Tensor | None = None  # [batch, n, H], detached

    def take_states(self) -> torch.Tensor:
        """Return the states and drop them from the request, since they are large."""
        states, self.states = self.states, None
        assert states is not None
        return states


class ViewRequest(NextTokenRequest):
    """For the call that compares two views: carries a batch and its divisors, gets the loss of both views.

    Args:
        labelled: the batch.
        ce_divisor: what the sum of cross-entropies is divided by.
        kl_divisor: what the KL is divided by, `SelfDistiller.kl_count` of all that the mean is over.
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
    """The standard view's forward first, with its graph, then the view's.

    Args:
        source: of the view.
        n_layers: of the model.
    """

    source: ViewSource
    n_layers: int

    def pair(self, call: DecoderCall, request: ViewRequest) -> Pairing:
        with rope_view(call.decoder, "standard"):
            standard = call.run_before().last_hidden_state
        output = yield None
        # not earlier: the draw that s belongs to is made in the view's forward
        first = first_changed(self.source, request.labelled, self.n_layers)
        return PairedStates(standard, output.last_hidden_state, first, request.labelled)


@dataclass(frozen=True)
class SequentialPasses(Passes):
    """The second of two calls, each with its own backward, so that one graph lives at a time.

    The first call has written the detached states of the standard view to its `StandardRequest`, here `earlier`.

    Args:
        source: of the view.
        n_layers: of the model.
    """

    source: ViewSource
    n_layers: int

    def pair(self, call: DecoderCall, request: ViewRequest) -> Pairing:
        assert request.earlier is not None
        output = yield None
        # not earlier: the draw that s belongs to is made in the view's forward
        first = first_changed(self.source, request.labelled, self.n_layers)
        return PairedStates(request.earlier.take_states(), output.last_hidden_state, first, request.labelled)


@dataclass(frozen=True)
class OnePass(Passes):
    """One forward over the tokens and, behind them, copies of those that the view moves (`TwoViewLayout`).

    A call takes two passes instead if the model passes finished 4D masks to its decoder.

    Args:
        causal_lm: the model.
        decoder: its decoder.
        parameters: names of what its forward takes, in order.
        state: of the patched model.
        source: of the view.
    """

    causal_lm: nn.Module
    decoder: Any
    parameters: tuple[str, ...]
    state: RopeState
    source: ViewSource

    def pair(self, call: DecoderCall, request: ViewRequest) -> Pairing:
        named = {**dict(zip(self.parameters, call.args, strict=False)), **call.kwargs}
        n_layers = self.decoder.config.num_hidden_layers
        # masks finished by the model around the decoder may show more than causality, as between parts of an image
        if named.get("attention_mask") is not None and not _is_padding_mask(named["attention_mask"]):
            logger.warning_once(
                "Both views run in two passes, because the model passes finished 4D masks to its decoder."
            )
            return (yield from TwoPasses(self.source, n_layers).pair(call, request))
        # draw before the forward: the draw decides which tokens are copied
        drawn, positions = self._bind(named, request.labelled)
        first = first_changed(self.source, request.labelled, n_layers)
        layout = TwoViewLayout.of(request.labelled, first, copy_granule(self.causal_lm, positions.shape[1]))
        index = layout.index(positions, _from_document_starts(drawn(positions), positions, request.labelled))
        request.attention = TwoViewAttention(layout, self.causal_lm, self.decoder.config)
        table = TableSource(index)
        self.state.overrides.append(table)  # `SelfDistiller.active` removes it if the forward raises
        output = yield (), _with_copies(named, layout, positions)
        self.state.overrides.remove(table)
        if not request.attended:
            raise ValueError(
                f"{type(self.causal_lm).__name__} does not call its attention through Transformers' table with the "
                "keyword arguments that it gets, so one forward cannot give both views: ask for two passes, "
                "objective_args={'passes': 'two'}."
            )
        return PairedStates(output.last_hidden_state, output.last_hidden_state, first, request.labelled, layout.seen)

    def _bind(self, named: dict[str, Any], labelled: Labelled) -> tuple[ForwardIndex, torch.Tensor]:
        """The view with its draws for the call, and true positions, [batch, n]."""
        (n_rows, seq_len), device = labelled.ids.shape, labelled.ids.device
        position_ids = named.get("position_ids")
        drawn = self.source.bind(
            Batch(
                rows=n_rows,
                seq_len=seq_len,
                device=device,
                position_ids=position_ids,
                attention_mask=named.get("attention_mask"),
                cached=0,
                training=self.decoder.training,
                ids=labelled.ids,
            )
        )
        positions = torch.arange(seq_len, device=device) if position_ids is None else position_ids
        return drawn, positions.expand(n_rows, seq_len)


def _from_document_starts(index: torch.Tensor, positions: torch.Tensor, labelled: Labelled) -> torch.Tensor:
    """RoPE indices of a view, [batch, n], shifted so that each document begins at its true position.

    A view may shift a whole prefix (cyclic). RoPE does not see that, but the copies share the prefix of the tokens.
    """
    begins = labelled.valid & (labelled.t == 0)
    shift = torch.zeros(int(labelled.ordinal.max()) + 1, dtype=index.dtype, device=index.device)
    shift[labelled.ordinal[begins]] = (index - positions)[begins]
    return index - shift[labelled.ordinal]


def _with_copies(named: dict[str, Any], layout: TwoViewLayout, positions: torch.Tensor) -> dict[str, Any]:
    """Arguments of the decoder for tokens and copies."""
    n_rows, seq_len = positions.shape
    # a 4D mask keeps Transformers from building one; TwoViewAttention has its own mask
    unused = torch.ones(n_rows, 1, 1, 1, dtype=torch.bool, device=positions.device)
    return {
        # tokens, embeddings, and anything else that a family computes per token outside its decoder
        **{name: layout.with_copies(x) if _is_per_token(x, n_rows, seq_len) else x for name, x in named.items()},
        "attention_mask": unused,
        # true positions: some families scale queries by them
        "position_ids": layout.with_copies(positions),
        "use_cache": False,
    }


def _is_padding_mask(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.ndim == 2


def _is_per_token(value: Any, n_rows: int, seq_len: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[:2] == (n_rows, seq_len)


def first_changed(source: ViewSource, labelled: Labelled, n_layers: int) -> torch.Tensor:
    """s, the first token of each document that the forward's draw moves, in the shape of its documents.

    Raises:
        ValueError: no view was drawn in the forward, because its position IDs have several axes (mRoPE).
    """
    if source.last is None:  # the hooks leave mRoPE to the model
        raise ValueError(
            "objective 'self-distill' needs a view, and position IDs with several axes (mRoPE, with images) have "
            "none: use 'hidden-distill' or 'relation-distill' without a view."
        )
    return source.last.affected_from(labelled.drawn_at, n_layers)
