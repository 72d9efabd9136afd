"""Base of rescalings (RoPE scaling), and checks that several of them need."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from ..base.registry import RESCALINGS as RESCALINGS
from ..base.validators import require_integer, require_number
from ..views.base import MAX_INDEX
from .frequencies import rope_parameters_of


@dataclass(frozen=True)
class NativeRope:
    """The RoPE parameters that a model was trained with, for one set of frequencies.

    Args:
        rope_parameters: Transformers' dictionary: rope_type, rope_theta (base B) and the options of the type.
        window: trained window, in positions.
        theta: the frequencies, [d/2] float64, radians per position.
        attention_scaling: what cos and sin are multiplied by: 1, but for YaRN and LongRoPE.
    """

    rope_parameters: Mapping[str, Any]
    window: int
    theta: torch.Tensor = field(compare=False)
    attention_scaling: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """d, twice the number of frequencies."""
        return 2 * len(self.theta)

    @property
    def rope_type(self) -> str:
        """Transformers' name of the formula."""
        return self.rope_parameters["rope_type"]

    @property
    def rope_theta(self) -> float:
        """Base B of the frequencies theta_j = B^(-2j/d), j = 0..d/2-1."""
        return self.rope_parameters["rope_theta"]


class Rescaling:
    """Base of all rescalings; subclasses are frozen dataclasses registered in `RESCALINGS`.

    A subclass defines `frequencies`, and what it leaves out has a default. They are written to the config as RoPE
    parameters of Transformers (`transformers.modeling_rope_utils`), so that checkpoints load anywhere. A subclass that
    has a rope_type of its own there defines `rope_parameters` instead.
    """

    name: ClassVar[str]
    synonyms: ClassVar[tuple[str, ...]] = ()  # other names of the method, for errors
    cites: ClassVar[tuple[str, ...]] = ()  # BibTeX of its papers, for the model card
    factor_per_window: ClassVar[float] = 1.0  # `factor` needed for a target window, in units of the trained window

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "frequencies" in vars(cls) and "rope_parameters" not in vars(cls):
            cls.rope_parameters = Rescaling.rope_parameters  # type: ignore[method-assign]  # not those of a parent

    def frequencies(self, theta: torch.Tensor, native: NativeRope) -> torch.Tensor:
        """The new frequencies theta', [d/2], radians per position; 0 stops a pair of features.

        Args:
            theta: those that the model was trained with, [d/2] float64: theta_j = B^(-2j/d) if its rope_type is
                "default".
            native: all RoPE parameters that it was trained with.
        """
        raise NotImplementedError(f"{type(self).__name__} must define frequencies, or rope_parameters.")

    def attention_scaling(self, native: NativeRope) -> float:
        """What cos and sin are multiplied by under the new `frequencies`, above 0; by default as in training."""
        return native.attention_scaling

    def rope_parameters(self, native: NativeRope) -> dict[str, Any]:
        """Entries of Transformers' `rope_parameters` that replace the scaling entries of `native`.

        By default those of `frequencies` and `attention_scaling`, in the plainest form.

        Raises:
            ValueError: this rescaling cannot start from the native RoPE parameters, or its frequencies make no sense.
        """
        return rope_parameters_of(self, native)

    @property
    def gives_frequencies(self) -> bool:
        """Whether the RoPE parameters are those of `frequencies`."""
        return type(self).rope_parameters is Rescaling.rope_parameters

    def target_window(self, native_window: int) -> int | None:
        """Window after rescaling, in positions, written as `max_position_embeddings`; None leaves that unchanged."""
        return None

    @property
    def wants_window(self) -> bool:
        """Whether the options leave the target window open, so that `with_window` can set it."""
        return False

    def with_window(self, window: int) -> "Rescaling":
        """The same rescaling with a target window of `window` positions, if it `wants_window`.

        A trainer passes the longest row, the target of the view or the trained window, whichever is largest.
        """
        return self

    def remedy(self, window: int, required: int) -> str:
        """Advice for errors: how to get a window of `required` positions where these options give `window`."""
        options = self.options()
        factor = options.get("factor")
        if "max_position_embeddings" in options or (factor is None and hasattr(self, "max_position_embeddings")):
            return f"Set rescale_args max_position_embeddings to at least {required}"
        if factor is None:
            return f"Choose rescale_args of {self.name!r} whose window holds {required} positions"
        needed = math.ceil(required * max(factor, self.factor_per_window) / window)
        return f"Set factor in rescale_args to at least {needed}"

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{name} {value}' for name, value in self.options().items())})"

    def options(self) -> dict[str, Any]:
        """The arguments that are not None: those of an equal rescaling."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}  # type: ignore[arg-type]


class WindowAsOption(Rescaling):
    """Base of rescalings whose formula implies no window, so that it is an option."""

    max_position_embeddings: int | None

    def target_window(self, native_window: int) -> int | None:
        return self.max_position_embeddings

    @property
    def wants_window(self) -> bool:
        return self.max_position_embeddings is None

    def with_window(self, window: int) -> Rescaling:
        return replace(self, max_position_embeddings=window) if self.wants_window else self  # type: ignore[type-var]


def without_none(**entries: Any) -> dict[str, Any]:
    """The entries that are not None: Transformers treats a missing key and None differently."""
    return {name: value for name, value in entries.items() if value is not None}


def stretched(window: int, factor: float) -> int:
    """A window of `window * factor` positions as the integer that Transformers requires."""
    return round(window * factor)


def require_factor(owner: Rescaling, factor: Any) -> None:
    """Raise unless `factor` is a finite number of at least 1."""
    twice = f"{owner.factor_per_window:g} * " if owner.factor_per_window != 1 else ""
    require_number(f"rescaling {owner.name!r}: factor ({twice}target window / trained window)", factor, least=1)


def require_numbers(owner: Rescaling, *, above: float = 0.0, **values: float | None) -> None:
    """Raise unless every value is None or a finite number above `above`."""
    for name, value in values.items():
        if value is not None:
            require_number(f"rescaling {owner.name!r}: {name}", value, above=above)


def require_window(owner: Rescaling, name: str, window: int | None) -> None:
    """Raise unless `window` is None or an integer in [1, MAX_INDEX]: float32 holds no larger position exactly."""
    if window is not None:
        require_integer(f"rescaling {owner.name!r}: {name}", window, least=1, most=MAX_INDEX)


def require_native(owner: Rescaling, native: NativeRope, allowed: Sequence[str], instead: str) -> None:
    """Raise unless the native `rope_type` is one of `allowed`; other types would be lost silently."""
    if native.rope_type not in allowed:
        raise ValueError(
            f"rescaling {owner.name!r} starts from RoPE parameters of type {' or '.join(allowed)}; this model was "
            f"trained with {native.rope_type!r} ({dict(native.rope_parameters)}), which would be lost. {instead}"
        )


def origin(owner: Rescaling, native: NativeRope, original_max_position_embeddings: int | None) -> int:
    """The context window that the new RoPE parameters stretch: the native one, unless the caller names another.

    For a model that was pretrained with a scaling, such as Llama 3.1, the caller has to name it, since the new RoPE
    parameters replace the old ones.
    """
    if original_max_position_embeddings is not None:
        return original_max_position_embeddings
    require_native(
        owner,
        native,
        ("default",),
        "Give original_max_position_embeddings to say from which window the new RoPE parameters start, or use 'abf', "
        "which changes only the base.",
    )
    return native.window
