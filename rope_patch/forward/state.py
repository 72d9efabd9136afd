"""What is in force on a patched model, and which RoPE indices the forward in flight gets.

One `RopeState` per model hangs on its decoder and is shared by the hooks. Only modules outside the checkpointed layers
read it, so a recompute in backward never sees a later state. It holds tensors and plain values: it can be copied,
pickled and traced.
"""

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from ..families.local_layers import LocalLayers
from ..layout.shards import SequenceShard
from ..views.base import View
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
    """The decoder whose mode another one goes by."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = weakref.ref(decoder)

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""
        decoder = self._decoder()
        return decoder is not None and decoder.training


@dataclass
class RopeState:
    """All that was done to a model. Lives at `decoder._rope_patch`.

    Args:
        original: RoPE parameters of the model before the first patch, bit for bit.
        native: the same with frequencies in float32: what the model was trained with.
        current: those in force.
        start: those that a rescaling starts from: `native`, or those that a loaded adapter was trained with.
        start_rescalings: what made `start` of `native`, in order.
        rescaling: the rescaling that made `current` of `start`, if any.
        local: the layers that a view leaves at true positions.
        source: the view of `patch_model`, if any.
        when: in which forwards that view is sampled.
        ended: the view of a training that is over, and when it was sampled: what adapters record from then on.
        leader: of a reference model, the decoder whose training it takes part in.
        overrides: sources of the `rope_view` blocks that are open, innermost last.
        lock: lets one thread at a time into a forward of the model.
        drawn: indices of the forward in flight.
        applied: whether a rotary module has used them.
        layers_call_rotary: a rotary module sits inside a layer, so that checkpointing runs it again in backward.
        native_blocks: how many `native_rope` blocks are open.
        native_configs: native configs that rotary modules read in forwards, by module name; they get them in the block.
        beside_native: those that come back at their end, what the modules held of them, and the modules' configs.
        temporary: whether a block put the patch on, which then ends with the last block.
        shard: which tokens of whole rows forwards get, where several ranks share a sequence; None: all of them.
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
    layers_call_rotary: bool = False
    native_blocks: int = 0
    native_configs: dict[str, Any] = field(default_factory=dict)
    beside_native: "tuple[RopeParameters, RopeParameters, dict[str, Any]] | None" = None
    temporary: bool = False
    shard: SequenceShard | None = None

    def require_no_native_rope(self, what: str) -> None:
        """Raise ValueError inside `native_rope`, whose end puts back the RoPE parameters from before."""
        if self.native_blocks:
            raise ValueError(inside_native_rope(what))

    def __getstate__(self) -> dict[str, Any]:
        self.require_no_native_rope("copying or pickling the model")
        return {**self.__dict__, "leader": None}  # a copy of a reference model goes by its own mode

    @property
    def rescalings(self) -> "tuple[Rescaling, ...]":
        """All that made the RoPE parameters in force of the native ones, in order; () if they are native."""
        return self.start_rescalings if self.rescaling is None else (*self.start_rescalings, self.rescaling)

    def settle(self) -> None:
        """Let rescalings from now on start from the RoPE parameters in force, which the weights were trained with."""
        self.start, self.start_rescalings, self.rescaling = self.current, self.rescalings, None

    def in_training(self, decoder: nn.Module) -> bool:
        """Whether a forward of `decoder` belongs to training; that of a reference model does if its leader's would.

        Only while a trainer sets their clock: trainers leave the leader in training mode, and the reference to others.
        """
        if self.leader is None:
            return decoder.training
        return self.leader.training and self.source is not None and self.source.clock.is_set

    def active(self, training: bool) -> ViewSource | TableSource | None:
        """The source that decides the next forward's indices; None for true positions."""
        override = self.overrides.innermost()
        if override is not None:
            return override
        if self.source is not None and (training or self.when == "always"):
            return self.source
        return None

    def enter(self, batch: Batch) -> None:
        """Begin a forward of the decoder."""
        source = self.active(batch.training)
        self.applied = False
        self.drawn = None if source is None else source.bind(batch)
        if batch.cached:
            set_in_view(batch.cache, True)

    def leave(self, finished: bool, cache: Any) -> None:
        """End it; a view that no rotary module has used would be lost in silence.

        Args:
            finished: whether it returned.
            cache: that a forward in inference returned, if any.
        """
        drawn, self.drawn = self.drawn, None
        if cache is not None:
            set_in_view(cache, False)
        if cache is not None and isinstance(drawn, DrawnView | IndexTable) and not drawn.continues:
            keep_draws(cache, drawn)
        if finished and drawn is not None and not self.applied:
            raise RuntimeError(
                "A RoPE view was in force but the model called none of its rotary modules in this forward, so it had "
                "no effect. Either its config switches RoPE off or this model computes positions elsewhere."
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
