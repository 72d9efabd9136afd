"""RoPE scaling of Llama 3.1: slow frequencies divided, fast ones kept, a ramp between."""

from dataclasses import dataclass
from typing import Any

from ..base import papers
from .base import (
    RESCALINGS,
    NativeRope,
    Rescaling,
    origin,
    require_factor,
    require_numbers,
    require_window,
    stretched,
    without_none,
)


@RESCALINGS.register("llama3")
@dataclass(frozen=True)
class Llama3(Rescaling):
    """theta'_j = theta_j for wavelengths below L0/high, theta_j / factor above L0/low, interpolated between.

    Between, with wavelength w_j = 2 pi / theta_j and m = (L0 / w_j - low) / (high - low):
    theta'_j = (1 - m) theta_j / factor + m theta_j.

    Args:
        factor: divisor of the slow frequencies, at least 1; target window / L0 unless max_position_embeddings is given.
        low_freq_factor: low, above 0; None means the native value of RoPE parameters of this type, or else 1.
        high_freq_factor: high, above low; None means the native value of RoPE parameters of this type, or else 4.
        original_max_position_embeddings: L0, in positions; None means the trained window.
        rope_theta: another base B; None keeps the model's.
        max_position_embeddings: target window, in positions; None means L0 * factor. With a factor such as 2**20, which
            stops the slow frequencies, it has to be given.

    When: Use it to extend a model as Llama 3.1 was extended.

    Source: The Llama 3 herd of models, arXiv:2407.21783, and Meta's release of Llama 3.1; rope_type "llama3".
    """

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    rope_theta: float | None = None
    max_position_embeddings: int | None = None

    cites = (papers.LLAMA3,)
    synonyms = ("llama3.1",)

    def __post_init__(self) -> None:
        require_factor(self, self.factor)
        require_window(self, "original_max_position_embeddings", self.original_max_position_embeddings)
        require_window(self, "max_position_embeddings", self.max_position_embeddings)
        require_numbers(self, above=1.0, rope_theta=self.rope_theta)
        require_numbers(self, low_freq_factor=self.low_freq_factor, high_freq_factor=self.high_freq_factor)
        low, high = self._ramp()
        if low >= high:
            raise ValueError(
                "rescaling 'llama3': low_freq_factor must be below high_freq_factor (1 and 4 by default), "
                f"got {low} and {high}."
            )

    def _ramp(self) -> tuple[float, float]:
        low = 1.0 if self.low_freq_factor is None else self.low_freq_factor
        high = 4.0 if self.high_freq_factor is None else self.high_freq_factor
        return float(low), float(high)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        low, high = self._ramp()
        return {
            "rope_type": "llama3",
            "factor": float(self.factor),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": origin(self, native, self.original_max_position_embeddings),
            **without_none(rope_theta=self.rope_theta),
        }

    def target_window(self, native_window: int) -> int:
        if self.max_position_embeddings is not None:
            return self.max_position_embeddings
        return stretched(self.original_max_position_embeddings or native_window, self.factor)
