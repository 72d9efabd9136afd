"""Divisors of RoPE frequencies as a point of few coordinates, which a search can move."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rope_patch import patch_model, unpatch_model
from rope_patch.rope.rotary import find_decoder, named_rotary_modules

Rescale = tuple[str, dict[str, Any]]
TEMPERATURE = 4.0  # a step of the search changes the attention factor by a quarter of what it changes divisors by


@dataclass(frozen=True)
class Divisors:
    """theta'_j = theta_j / f_j for all lengths, with cos and sin multiplied by the attention factor.

    Args:
        by_frequency: f_j, the fastest frequency's first.
        attention_factor: above 0.
    """

    by_frequency: tuple[float, ...]
    attention_factor: float

    def rescale(self, window: int, target: int) -> Rescale:
        """Method and options of `patch_model`: LongRoPE with the same divisors for short and long rows."""
        options = {
            "factor": target / window,
            "long_factor": list(self.by_frequency),
            "short_factor": list(self.by_frequency),
            "original_max_position_embeddings": window,
            "attention_factor": self.attention_factor,
        }
        return "longrope", options


@dataclass(frozen=True)
class Space:
    """Divisors near those of a rescaling with a formula, that do not fall from one frequency to the next.

    A point is (u_0, ..., u_{K-1}, v), any real numbers. With F and A of the start, and u(j) linear between knots, of
    which knot k lies at frequency k (n - 1) / (K - 1) of 0..n - 1:

        ln f_j = max(0, max over i <= j of ln F_i + u(i)), attention factor = A exp(v / TEMPERATURE)

    The start is the point 0. From any of native, PI (ln f the same everywhere) and NTK (ln f linear in j) the others
    are points as well; YaRN is one from itself alone.

    Args:
        start: F and A.
        knots: K, at least 2 and at most the number of frequencies n.
    """

    start: Divisors
    knots: int

    def __post_init__(self) -> None:
        n_freq = len(self.start.by_frequency)
        if not 2 <= self.knots <= n_freq:
            raise ValueError(f"knots must be between 2 and the model's {n_freq} frequencies, got {self.knots}.")

    def divisors(self, point: Sequence[float]) -> Divisors:
        """What a point stands for."""
        *moves, warmth = point
        n_freq = len(self.start.by_frequency)
        moved = np.interp(np.arange(n_freq), np.linspace(0, n_freq - 1, self.knots), moves)
        logs = np.maximum(np.maximum.accumulate(np.log(self.start.by_frequency) + moved), 0.0)
        return Divisors(tuple(np.exp(logs).tolist()), self.start.attention_factor * math.exp(warmth / TEMPERATURE))


def references(window: int, target: int) -> dict[str, Rescale | None]:
    """Rescalings with a formula, by name: what a search starts from, and what it is compared with."""
    factor = target / window
    return {
        "native": None,
        "pi": ("pi", {"factor": factor}),
        "ntk": ("ntk", {"factor": factor}),
        "ntk-2": ("ntk", {"factor": 2 * factor}),
        "ntk-4": ("ntk", {"factor": 4 * factor}),
        "yarn": ("yarn", {"factor": factor}),
        # without the temperature that multiplies logits
        "yarn-cold": ("yarn", {"factor": factor, "attention_factor": 1.0}),
    }


def divisors_of(model: Any, rescale: Rescale | None) -> Divisors:
    """The divisors of a rescaling, as the package builds it for this model, which is left as it was.

    Raises:
        ValueError: the model has not one set of frequencies for all layers.
    """
    rotary = [module for _, module in named_rotary_modules(find_decoder(model))]
    if len(rotary) != 1 or not hasattr(rotary[0], "inv_freq"):
        raise ValueError(f"{type(model).__name__} has not one set of RoPE frequencies for all layers.")
    native = rotary[0].inv_freq.double()
    if rescale is None:
        return Divisors((1.0,) * len(native), 1.0)
    patch_model(model, rescale[0], **rescale[1])
    try:
        by_frequency = (native / rotary[0].inv_freq.double()).tolist()
        return Divisors(tuple(by_frequency), float(rotary[0].attention_scaling))
    finally:
        unpatch_model(model)
