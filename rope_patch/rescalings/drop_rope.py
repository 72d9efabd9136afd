"""RoPE switched off, with RoPE parameters that every program reads."""

from dataclasses import dataclass
from typing import Any

from ..base import papers
from .base import RESCALINGS, NativeRope, Rescaling, WindowAsOption, require_window

DROP_FACTOR = 1e9
"""Divisor of all frequencies: at position 131072 the fastest has turned by 1.3e-4 radians."""


@RESCALINGS.register("drop-rope")
@dataclass(frozen=True)
class DropRope(WindowAsOption):
    """theta'_j = theta_j / 1e9, so that RoPE rotates by almost 0: cos is 1, sin below 1.4e-4 up to position 131072.

    Only the causal mask then orders tokens, as under the view 'nope'. DroPE trains with RoPE, drops it, and trains
    briefly again. The config has rope_type "llama3" with an original window of 1, which divides every frequency.

    Args:
        max_position_embeddings: target window for the config, in positions; None keeps the trained one.

    When: Use it to reproduce DroPE; train at the native window afterwards.

    Source: DroPE, Sakana AI, 2025 (drop positional embeddings after pretraining, then recalibrate).
    """

    max_position_embeddings: int | None = None

    cites = (papers.DROPE,)
    synonyms = ("drope",)

    def __post_init__(self) -> None:
        require_window(self, "max_position_embeddings", self.max_position_embeddings)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": DROP_FACTOR,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1,  # below all wavelengths, of which 2 pi is the shortest
        }


def require_rotation(owner: Rescaling, native: NativeRope) -> None:
    """Raise ValueError for a checkpoint of 'drop-rope', on which a new base would have no effect."""
    parameters = native.rope_parameters
    if native.rope_type == "llama3" and parameters.get("factor") == DROP_FACTOR:
        raise ValueError(
            f"rescaling {owner.name!r} would change nothing: this checkpoint was saved under 'drop-rope', which leaves "
            "no rotation to scale. Use the model that it was made from, or 'drop-rope' with another "
            "max_position_embeddings."
        )
