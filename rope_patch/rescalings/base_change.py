"""Rescalings by another base: the fastest frequency changes least, the slowest most."""

from dataclasses import dataclass, replace
from typing import Any

from ..base import papers
from ..rope.rotary import is_dynamic, with_factor
from .base import (
    RESCALINGS,
    NativeRope,
    Rescaling,
    require_factor,
    require_native,
    require_numbers,
    require_window,
    stretched,
)
from .dropped import require_rotation


def _with_base(native: NativeRope, rope_theta: float) -> dict[str, Any]:
    """The native RoPE parameters, whatever their type, over another base."""
    return {**native.rope_parameters, "rope_theta": rope_theta}


@RESCALINGS.register("ntk")
@dataclass(frozen=True)
class NTK(Rescaling):
    """theta'_j = B'^(-2j/d) with B' = B factor^(d/(d-2)): the slowest frequency is divided by factor, the fastest kept.

    Args:
        factor: twice target window / trained window, at least 1.

    When: Use it if answers within the trained window must not get worse.

    Source: NTK-aware scaled RoPE; YaRN, arXiv:2309.00071, eq. 16. Saved as a plain base, which every program reads.
    """

    factor: float

    cites = (papers.NTK_AWARE, papers.YARN)
    synonyms = ("ntk-aware", "ntk-scaling")
    # A factor f reaches f / 2 windows, as it divides the slowest frequency by f and all others by less: by 3.8 of 8
    # where a frequency of SmolLM2-135M turns once in the window. Passkeys that it found (research/results/keeping.md
    # and extension.md), untrained: 4x .80 at two windows and .10 at four, 8x .78 at four and 0 at seven, 16x .48 at
    # seven; Gemma-3-270M, 8x .86 at four. Trained: 4x .53 at four windows, 16x .99 at seven.
    factor_per_window = 2.0

    def __post_init__(self) -> None:
        require_factor(self, self.factor)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        require_rotation(self, native)
        require_native(self, native, ("default", "linear", "llama3"), "Use 'abf' with the base that you want.")
        d = native.rotary_dim
        if d < 4:
            raise ValueError(
                f"rescaling 'ntk' needs 2 frequencies or more, and this model rotates {d} features: use 'pi'."
            )
        return _with_base(native, native.rope_theta * float(self.factor) ** (d / (d - 2)))

    def target_window(self, native_window: int) -> int:
        return max(native_window, stretched(native_window, self.factor / self.factor_per_window))


@RESCALINGS.register("abf")
@dataclass(frozen=True)
class ABF(Rescaling):
    """theta'_j = theta^(-2j/d): the base is replaced, the other RoPE parameters stay.

    Args:
        theta: new base, above 1.
        max_position_embeddings: target window to write into the config, in positions; None keeps the trained one,
            since a base alone does not say how far it reaches. Not for a model whose scaling begins there ("dynamic").

    When: Use it for longer training, and to keep RoPE parameters such as those of Llama 3.1.

    Source: adjusted base frequency, arXiv:2309.16039, section 2.1.
    """

    theta: float
    max_position_embeddings: int | None = None

    cites = (papers.ABF,)
    synonyms = ("base", "theta", "rope-theta", "adjusted-base-frequency")

    def __post_init__(self) -> None:
        require_numbers(self, above=1.0, theta=self.theta)
        require_window(self, "max_position_embeddings", self.max_position_embeddings)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        require_rotation(self, native)
        parameters = _with_base(native, float(self.theta))
        if self.max_position_embeddings in (None, native.window):
            return parameters
        if is_dynamic(native.rope_type):
            raise ValueError(
                f"rescaling 'abf': max_position_embeddings must be left out for a model of rope type "
                f"{native.rope_type!r}, whose scaling begins at the end of the config's window: it would begin at "
                f"{self.max_position_embeddings} positions instead of {native.window}. Leave it out and call "
                "patch_model before making a trainer, which would set it; or use 'yarn' with "
                f"original_max_position_embeddings={native.window}."
            )
        return with_factor(parameters, native.window)

    def target_window(self, native_window: int) -> int | None:
        return self.max_position_embeddings

    @property
    def wants_window(self) -> bool:
        return self.max_position_embeddings is None

    def with_window(self, window: int) -> "ABF":
        return replace(self, max_position_embeddings=window) if self.wants_window else self

    def remedy(self, window: int, required: int) -> str:
        return f"Set rescale_args max_position_embeddings to at least {required}"
