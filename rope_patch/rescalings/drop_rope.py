"""RoPE switched off, by RoPE parameters that every program reads."""

from dataclasses import dataclass, replace
from typing import Any

from ..base import papers
from .base import RESCALINGS, NativeRope, Rescaling, require_window
from .dropped import DROP_FACTOR


@RESCALINGS.register("drop-rope")
@dataclass(frozen=True)
class DropRope(Rescaling):
    """theta'_j = theta_j / 1e9, so that RoPE rotates by almost 0: cos is 1, sin below 1.4e-4 up to position 131072.

    Only the causal mask still tells the order of tokens. The view 'nope' does the same in training. DroPE trains with
    RoPE, drops it, and trains briefly again. It is written as rope_type "llama3" with an original window of 1, so that
    every frequency is divided, whatever the native RoPE parameters are.

    Args:
        max_position_embeddings: target window to write into the config, in positions; None keeps the trained one.

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
