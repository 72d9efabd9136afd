"""The patches of a model, and the RoPE indices of the forward in flight.

The decoder holds one `RopeState`, which the hooks share. Only modules outside checkpointed layers read it, so that a
recompute in backward never sees a later state. It holds tensors and plain values, and can be copied, pickled and
traced.
"""

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from ..families.local_layers import LocalLayers
from ..layout.shards import SequenceShard
from ..rescalings.query_scale import is_read_by_family
from ..views.base import TRUE_POSITIONS, VIEWS, View
from .cached_draws import keep_draws, set_in_view
from .drawn_view import Batch, DrawnView, ForwardIndex, IndexTable
from .forward_lock import ForwardLock
from .open_views import OpenSources
from .sources import TableSource, ViewSource

if TYPE_CHECKING:
    from ..rescalings import Rescaling
    from ..rescalings.in_place import RopeParameters

When = Literal["train", "always"]


class Leader:
    """The decoder whose training mode a reference model follows."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = weakref.ref(decoder)

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""
        decoder = self._decoder()
        return decoder is not None and decoder.training


@dataclass
class RopeState:
    """The patches of a model, stored at `decoder._rope_patch`.

    Args:
        original: RoPE parameters of the model before the first patch, bit for bit.
        native: the same with frequencies in float32, as in pretraining.
        current: those in force.
        start: those that a rescaling starts from: `native`, or those that a loaded adapter was trained with.
        start_rescalings: the rescalings from `native` to `start`, in order.
        rescaling: the rescaling from `start` to `current`, if any.
        local: the layers that a view leaves at true positions.
        source: the view of `patch_model`, if any.
        when: in which forwards that view is sampled.
        ended: the view of a training that is over, and when it was sampled; adapters record it from then on.
        leader: of a reference model, the decoder of the model that is trained.
        overrides: sources of the `rope_view` blocks that are open, innermost last.
        lock: lets one thread at a time into a forward of the model.
        drawn: indices of the forward in flight.
        applied: whether a rotary module has used these indices.
        scales: whether queries of the forward in flight are scaled by hooks.
        layers_call_rotary: whether rotary modules are inside layers, so that checkpointing runs them again in backward.
        native_blocks: how many `native_rope` blocks are open.
        native_configs: by module name, configs that rotary modules read in forwards inside `native_rope`.
        beside_native: what the end of `native_rope` restores: `current`, the parameters in the modules, their configs.
        temporary: whether only blocks have patched the model, so that the patch ends with the last block.
        shard: which tokens this rank gets, if several ranks share a sequence; None means all.
    """

    original: "RopeParameters"
    native: "RopeParameters"
    current: "RopeParameters"
    start: "RopeParameters"
    start_rescalings: "tuple[Rescaling, ...]" = ()
    local: LocalLayers = LocalLayers()
    rescaling: "Rescaling | None" = None
    source: ViewSource | None = None
    when: When = "train"
    ended: tuple[View, When] | None = None
    leader: "Leader | None" = None
    overrides: "OpenSources[ViewSource | TableSource]" = field(default_factory=OpenSources)
    lock: ForwardLock = field(default_factory=ForwardLock)
    drawn: ForwardIndex | None = None
    applied: bool = False
    scales: bool = False
    layers_call_rotary: bool = False
    native_blocks: int = 0
    native_configs: dict[str, Any] = field(default_factory=dict)
    beside_native: "tuple[RopeParameters, RopeParameters, dict[str, Any]] | None" = None
    temporary: bool = False
    shard: SequenceShard | None = None

    def require_no_native_rope(self, what: str) -> None:
        """Raise ValueError inside `native_rope`, whose end restores the RoPE parameters from before it."""
        if self.native_blocks:
            raise ValueError(inside_native_rope(what))

    def __getstate__(self) -> dict[str, Any]:
        self.require_no_native_rope("copying or pickling the model")
        return {**self.__dict__, "leader": None}  # a copy of a reference model follows its own mode

    @property
    def rescalings(self) -> "tuple[Rescaling, ...]":
        """All rescalings between the native RoPE parameters and those in force, in order."""
        return self.start_rescalings if self.rescaling is None else (*self.start_rescalings, self.rescaling)

    def settle(self) -> None:
        """Let later rescalings start from the RoPE parameters in force, as the weights were trained with them."""
        self.start, self.start_rescalings, self.rescaling = self.current, self.rescalings, None

    def in_training(self, decoder: nn.Module) -> bool:
        """Whether a forward of `decoder` belongs to training; a reference model follows its leader.

        It does so only while a trainer sets the clock: after training, the leader may still be in training mode.
        """
        if self.leader is None:
            return decoder.training
        return self.leader.training and self.source is not None and self.source.clock.is_set

    def active(self, training: bool) -> ViewSource | TableSource | None:
        """The source of the next forward's indices; None for true positions."""
        override = self.overrides.innermost()
        if override is not None:
            return override
        if self.source is not None and (training or self.when == "always"):
            return self.source
        return None

    def source_without_view(self) -> ViewSource | None:
        """True positions counted by document, which a scale of queries goes by; None if there is none of ours."""
        scales = self.current.query_scale is not None and not is_read_by_family(self.current.rope_parameters)
        return ViewSource(VIEWS[TRUE_POSITIONS](), 0) if scales else None

    def enter(self, batch: Batch, source: ViewSource | TableSource) -> None:
        """Begin a forward of the decoder."""
        self.applied = self.scales = False
        self.drawn = source.bind(batch)
        if batch.cached:
            set_in_view(batch.cache, True)

    def leave(self, finished: bool, cache: Any) -> None:
        """End the forward, and raise if no rotary module used the view.

        Args:
            finished: whether the forward returned.
            cache: the cache that a forward in inference returned, if any.
        """
        drawn, self.drawn = self.drawn, None
        if cache is not None:
            set_in_view(cache, False)
        if cache is not None and isinstance(drawn, DrawnView | IndexTable) and not drawn.continues:
            keep_draws(cache, drawn)
        if finished and drawn is not None and not self.applied:
            raise RuntimeError(
                "the RoPE view had no effect, because the model called none of its rotary modules in this forward: its "
                "config switches RoPE off, or it computes positions elsewhere. Run it without the view."
            )


def inside_native_rope(what: str) -> str:
    """Why a call is refused inside `native_rope`."""
    return f"{what} was called inside native_rope: leave the block first."


STATE_ATTRIBUTE = "_rope_patch"


def state_of(decoder: Any) -> RopeState | None:
    """The state of a patched decoder, None if it is not patched."""
    return getattr(decoder, STATE_ATTRIBUTE, None)


def has_view(decoder: nn.Module, *, training: bool | None = None) -> bool:
    """Whether the next forward of a decoder, patched or not, gets other indices than its true positions.

    Args:
        decoder: of the model.
        training: whether that forward belongs to training; None for what the decoder's mode says.
    """
    state = state_of(decoder)
    if state is None:
        return False
    return state.active(state.in_training(decoder) if training is None else training) is not None


def needs_documents(decoder: nn.Module, *, training: bool | None = None) -> bool:
    """Whether the next forward has to see where documents begin, for a view or for a scale of queries by position."""
    state = state_of(decoder)
    return has_view(decoder, training=training) or (state is not None and state.source_without_view() is not None)
