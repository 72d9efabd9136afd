"""YaRN: fast frequencies kept, slow ones interpolated, logits sharpened."""

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


@RESCALINGS.register("yarn")
@dataclass(frozen=True)
class Yarn(Rescaling):
    """theta'_j = (1 - g_j) theta_j / factor + g_j theta_j, and cos, sin times 0.1 ln(factor) + 1.

    g_j = 1 - clamp((j - lo) / (hi - lo), 0, 1) with lo = floor(c(beta_fast)), hi = ceil(c(beta_slow)), both clamped to
    [0, d-1], and c(b) = d ln(L0 / (2 pi b)) / (2 ln B) the index whose frequency turns b times within the window L0.

    None means the native value of RoPE parameters of this type, or else the default below. A native attention factor
    that follows from the native factor by the formula is computed again from the new factor.

    Args:
        factor: s = target window / L0, at least 1.
        original_max_position_embeddings: L0, in positions; None means the trained window.
        rope_theta: another base B; None keeps the model's. After ABF: the ABF base, with L0 the window trained with it.
        attention_factor: what cos and sin are multiplied by; None means 0.1 ln(factor) + 1.
        beta_fast: frequencies with at least this many turns within L0 are kept; None means 32.
        beta_slow: frequencies with fewer turns within L0 are fully interpolated; None means 1.
        mscale: numerator of DeepSeek's attention factor, together with mscale_all_dim, in place of attention_factor.
        mscale_all_dim: denominator of DeepSeek's attention factor, and scale of its softmax. Without mscale only the
            latter, for the families that read it.
        truncate: whether lo and hi are rounded; None means yes.

    When: Use it for a longer window without training, or with little.

    Source: YaRN, arXiv:2309.00071, eqs. 23-25; rope_type "yarn".
    """

    factor: float
    original_max_position_embeddings: int | None = None
    rope_theta: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    cites = (papers.YARN,)
    synonyms = ("deepseek-yarn",)

    def __post_init__(self) -> None:
        require_factor(self, self.factor)
        require_window(self, "original_max_position_embeddings", self.original_max_position_embeddings)
        require_numbers(self, above=1.0, rope_theta=self.rope_theta)
        require_numbers(
            self,
            attention_factor=self.attention_factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            mscale=self.mscale,
            mscale_all_dim=self.mscale_all_dim,
        )
        if self.mscale is not None and (self.mscale_all_dim is None or self.attention_factor is not None):
            raise ValueError(
                "rescaling 'yarn': mscale must come with mscale_all_dim and without attention_factor, else it has no "
                f"effect; got mscale {self.mscale}, mscale_all_dim {self.mscale_all_dim} and attention_factor "
                f"{self.attention_factor}. Pass mscale and mscale_all_dim, or attention_factor alone."
            )
        fast = 32.0 if self.beta_fast is None else self.beta_fast
        slow = 1.0 if self.beta_slow is None else self.beta_slow
        if fast <= slow:
            raise ValueError(
                f"rescaling 'yarn': beta_fast must be above beta_slow (32 and 1 by default), got {fast} and {slow}: "
                "the ramp between kept and interpolated frequencies would run backwards."
            )

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        return {
            "rope_type": "yarn",
            # float: Transformers warns of an int
            "factor": float(self.factor),
            "original_max_position_embeddings": origin(self, native, self.original_max_position_embeddings),
            **without_none(
                rope_theta=self.rope_theta,
                attention_factor=self.attention_factor,
                beta_fast=self.beta_fast,
                beta_slow=self.beta_slow,
                mscale=self.mscale,
                mscale_all_dim=self.mscale_all_dim,
                truncate=self.truncate,
            ),
        }

    def target_window(self, native_window: int) -> int:
        return stretched(self.original_max_position_embeddings or native_window, self.factor)


def advised_rescaling(factor: float) -> str:
    """YaRN as arguments of a trainer's configuration, for errors: it has the lowest loss at far positions untrained."""
    return f"rescale={Yarn.name!r}, rescale_args={{'factor': {factor}}}"
