"""RoPE scaling by another base: the fastest frequency changes least, the slowest most."""

from dataclasses import dataclass
from typing import Any

from ..base import papers
from ..rope.rotary import is_dynamic, with_factor
from .base import (
    RESCALINGS,
    NativeRope,
    Rescaling,
    WindowAsOption,
    require_factor,
    require_native,
    require_numbers,
    require_window,
    stretched,
)
from .drop_rope import require_rotation


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
    # A factor f reaches f / 2 windows, since it divides only the slowest frequency by f and the others by less.
    # Passkeys found by SmolLM2-135M without training (research/results/keeping.md and extension.md): 4x .80 at two
    # windows and .10 at four, 8x .78 at four and 0 at seven, 16x .48 at seven.
    factor_per_window = 2.0

    def __post_init__(self) -> None:
        require_factor(self, self.factor)

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        require_rotation(self, native)
        require_native(self, native, ("default", "linear", "llama3"), "Use 'abf' with the base that you want.")
        d = native.rotary_dim  # twice the number of frequencies
        if d < 4:
            raise ValueError(
                f"rescaling 'ntk' needs 2 frequencies or more, and this model rotates {d} features: use 'pi'."
            )
        return {**native.rope_parameters, "rope_theta": native.rope_theta * float(self.factor) ** (d / (d - 2))}

    def target_window(self, native_window: int) -> int:
        return max(native_window, stretched(native_window, self.factor / self.factor_per_window))


@RESCALINGS.register("abf")
@dataclass(frozen=True)
class ABF(WindowAsOption):
    """theta'_j = theta^(-2j/d): the base is replaced, the other RoPE parameters stay.

    Args:
        theta: new base, above 1.
        max_position_embeddings: target window for the config, in positions; None keeps the trained one, since a base
            does not define a window. Not for rope type "dynamic", whose scaling begins at that window.

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
        parameters = {**native.rope_parameters, "rope_theta": float(self.theta)}
        if self.max_position_embeddings in (None, native.window):
            return parameters
        if is_dynamic(native.rope_type):
            raise ValueError(
                f"rescaling 'abf': max_position_embeddings must be left out for rope type {native.rope_type!r}, whose "
                f"scaling would begin at {self.max_position_embeddings} positions instead of {native.window}. Leave it "
                "out and call patch_model before making a trainer, which would set it; or use 'yarn' with "
                f"original_max_position_embeddings={native.window}."
            )
        return with_factor(parameters, native.window)
