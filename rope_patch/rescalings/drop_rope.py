"""No rotation at all, as RoPE parameters that every program reads."""

from dataclasses import dataclass, replace
from typing import Any

from ..base import papers
from .base import RESCALINGS, NativeRope, Rescaling, require_window
from .dropped import DROP_FACTOR


@RESCALINGS.register("drop-rope")
@dataclass(frozen=True)
class DropRope(Rescaling):
    """theta'_j = theta_j / 1e9, so that positions turn nothing: cosines of 1, sines below 1.4e-4 up to position 131072.

    Only the causal mask is left to tell the order of tokens. It is what the view 'nope' does, in a checkpoint: training
    with RoPE, dropping it and recalibrating is DroPE. Written as rope_type "llama3" with an original window of 1, which
    leaves no wavelength within it: every frequency is divided, whatever the native RoPE parameters are.

    Args:
        max_position_embeddings: target window to write into the config, in positions; None keeps the trained one,
            since no rotation is left to end it.

    When: Take it to reproduce DroPE, with training at the native window behind it.

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
            "original_max_position_embeddings": 1,
        }

    def target_window(self, native_window: int) -> int | None:
        return self.max_position_embeddings

    @property
    def wants_window(self) -> bool:
        return self.max_position_embeddings is None

    def with_window(self, window: int) -> "DropRope":
        return replace(self, max_position_embeddings=window) if self.wants_window else self

    def remedy(self, window: int, required: int) -> str:
        return f"Set rescale_args max_position_embeddings to at least {required}"
