"""LongRoPE: one divisor per frequency, found by search."""

from collections.abc import Sequence
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


@RESCALINGS.register("longrope")
@dataclass(frozen=True)
class LongRope(Rescaling):
    """theta'_j = theta_j / f_j, f = long_factor for sequences longer than L0 and short_factor for others.

    cos and sin are multiplied by sqrt(1 + ln(factor) / ln(L0)). None means the native value of RoPE parameters of this
    type, or else the default below.

    Args:
        factor: target window / L0, at least 1.
        long_factor: d/2 divisors above 0, one a frequency. LongRoPE finds them by search; there is no formula.
        short_factor: d/2 divisors for sequences of at most L0 tokens; None means 1 everywhere.
        original_max_position_embeddings: L0, in positions; None means the trained window.
        attention_factor: what cos and sin are multiplied by; None means the formula above.
        rope_theta: another base B; None keeps the model's.

    When: Use it with divisors from a search, such as those of Phi-3.

    Source: LongRoPE, arXiv:2402.13753; the attention factor is that of Phi-3; rope_type "longrope".
    """

    factor: float
    long_factor: Sequence[float]
    short_factor: Sequence[float] | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    rope_theta: float | None = None

    cites = (papers.LONGROPE,)
    synonyms = ("su",)

    def __post_init__(self) -> None:
        require_factor(self, self.factor)
        require_window(self, "original_max_position_embeddings", self.original_max_position_embeddings)
        require_numbers(self, attention_factor=self.attention_factor)
        require_numbers(self, above=1.0, rope_theta=self.rope_theta)
        for name in ("long_factor", "short_factor"):
            divisors = getattr(self, name)
            if divisors is not None:
                require_numbers(self, **{f"{name}[{i}]": f for i, f in enumerate(divisors)})
                object.__setattr__(self, name, tuple(float(f) for f in divisors))

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        n_freq = native.rotary_dim // 2
        short_factor = self.short_factor or (1.0,) * n_freq
        for name, divisors in (("long_factor", self.long_factor), ("short_factor", short_factor)):
            if len(divisors) != n_freq:
                raise ValueError(
                    f"rescaling 'longrope': {name} must have one divisor for each of the model's {n_freq} frequencies, "
                    f"got {len(divisors)}."
                )
        return {
            "rope_type": "longrope",
            "factor": float(self.factor),
            "long_factor": list(self.long_factor),
            "short_factor": list(short_factor),
            "original_max_position_embeddings": origin(self, native, self.original_max_position_embeddings),
            **without_none(attention_factor=self.attention_factor, rope_theta=self.rope_theta),
        }

    def target_window(self, native_window: int) -> int:
        return stretched(self.original_max_position_embeddings or native_window, self.factor)
