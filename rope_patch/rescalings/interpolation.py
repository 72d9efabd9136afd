"""Position interpolation, and NTK scaling that follows the longest sequence."""

from dataclasses import dataclass
from typing import Any

from ..base import papers
from .base import (
    RESCALINGS,
    NativeRope,
    Rescaling,
    require_factor,
    require_native,
    require_numbers,
    stretched,
    without_none,
)


@RESCALINGS.register("pi")
@dataclass(frozen=True)
class PI(Rescaling):
    """theta'_j = theta_j / factor: position t turns as t / factor did.

    Args:
        factor: target window / trained window, at least 1.
        rope_theta: another base B for theta_j; None keeps the model's.

    When: Use it to reproduce papers that start from it (LinearARD, EndPrompt, LongLoRA); YaRN harms a model less.

    Source: Position Interpolation, arXiv:2306.15595, eq. 3; rope_type "linear".
    """

    factor: float
    rope_theta: float | None = None

    cites = (papers.PI,)
    synonyms = ("linear", "interpolation", "position-interpolation", "linear-scaling")

    def __post_init__(self) -> None:
        require_factor(self, self.factor)
        require_numbers(self, above=1.0, rope_theta=self.rope_theta)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        require_native(self, native, ("default", "linear"), "Use 'abf', which keeps the RoPE parameters.")
        own = native.rope_parameters["factor"] if native.rope_type == "linear" else 1.0
        factor = float(self.factor) * own  # one interpolation after the other
        return {"rope_type": "linear", "factor": factor, **without_none(rope_theta=self.rope_theta)}

    def target_window(self, native_window: int) -> int:
        return stretched(native_window, self.factor)


@RESCALINGS.register("dynamic-ntk")
@dataclass(frozen=True)
class DynamicNTK(Rescaling):
    """theta'_j = B'^(-2j/d), B' = B ((factor n / L0) - (factor - 1))^(d/(d-2)), n = largest position so far + 1.

    Up to n = L0 nothing changes. Frequencies depend on the longest sequence so far, so views cannot train with it.
    `max_position_embeddings` stays: the formula reads it as L0.

    Args:
        factor: at least 1.
        rope_theta: another base B; None keeps the model's.

    When: Use it for inference without training, if nothing may change within the trained window.

    Source: NTK-aware scaled RoPE, dynamic form; YaRN, arXiv:2309.00071, section 3.3; rope_type "dynamic".
    """

    factor: float
    rope_theta: float | None = None

    cites = (papers.NTK_AWARE, papers.YARN)
    synonyms = ("dynamic",)

    def __post_init__(self) -> None:
        require_factor(self, self.factor)
        require_numbers(self, above=1.0, rope_theta=self.rope_theta)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        require_native(self, native, ("default",), "Use 'abf', which keeps the RoPE parameters.")
        return {"rope_type": "dynamic", "factor": float(self.factor), **without_none(rope_theta=self.rope_theta)}

    def target_window(self, native_window: int) -> None:
        return None
