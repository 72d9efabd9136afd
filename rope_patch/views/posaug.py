"""Positions scaled by one random factor per optimizer step."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..draws import DrawKey
from .base import VIEWS, Parameters, View, require_choice, require_indexable, require_range

Law = Literal["uniform", "log-uniform", "discrete", "cycling"]
Granularity = Literal["step", "micro-batch", "sample"]
Curriculum = Literal["linear", "step"]


@VIEWS.register("posaug")
@dataclass(frozen=True)
class PosAug(View):
    """r(t) = alpha t, real-valued, with one alpha ~ U[low, high] for each optimizer step.

    All sequences, gradient-accumulation micro-steps, ranks and layers of a step share the alpha. Scaling positions by
    alpha is scaling all frequencies by alpha, so a step with alpha > 1 trains on angles of a window alpha times longer.

    Args:
        low: smallest alpha, above 0.
        high: largest alpha, at least low; low = high fixes alpha.
        law: "uniform" on [low, high]; "log-uniform", exp U[ln low, ln high]; "discrete", one of `values`; "cycling",
            `values` in turn, by the optimizer step. Under "uniform" only 11 % of the steps have alpha < 1 at the
            default range.
        values: alphas of "discrete" and "cycling".
        granularity: what shares an alpha: a "step", a "micro-batch" or a "sample", that is, a document.
        curriculum: by the progress p of training, from 0 to 1: "linear" moves the range from `start`, at p = 0, to
            [low, high], at p = 1; "step" keeps alpha = 1 until p = `until`. None has neither. Without a trainer p is 1.
        start: [low, high] of "linear" at the start.
        until: share of training before the range of "step".

    Source: Position Augmentation (PosAug), FoGen 2026; the default range is that of its main results, laws and
        curricula are those of its ablations, granularity is ours.
    """

    low: float = 1 / 8
    high: float = 8.0
    law: Law = "uniform"
    values: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    granularity: Granularity = "step"
    curriculum: Curriculum | None = None
    start: tuple[float, float] = (0.5, 2.0)
    until: float = 0.5

    def __post_init__(self) -> None:
        for name in ("values", "start"):  # lists, from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require_range(self, self.low, self.high)
        require_choice(self, "law", self.law, get_args(Law))
        require_choice(self, "granularity", self.granularity, get_args(Granularity))
        require_choice(self, "curriculum", self.curriculum, (*get_args(Curriculum), None))
        if not self.values:
            raise ValueError("view 'posaug': values must hold at least one alpha, got ().")
        for value in self.values:
            require_range(self, value, value)
        if len(self.start) != 2:
            raise ValueError(f"view 'posaug': start must be [low, high], got {self.start}.")
        require_range(self, *self.start)
        if not 0 < self.until < 1:
            raise ValueError(f"view 'posaug': until must be in (0, 1), got {self.until}.")
        if self.law == "cycling" and self.granularity != "step":
            raise ValueError(f"view 'posaug': 'cycling' goes by steps, got granularity={self.granularity!r}.")
        if self._from_values and self.curriculum == "linear":
            raise ValueError(f"view 'posaug': curriculum 'linear' moves a range, which law {self.law!r} does not have.")

    @property
    def _from_values(self) -> bool:
        return self.law in ("discrete", "cycling")

    def check_length(self, length: int) -> None:
        require_indexable(self, max(self.reach(length), length - 1))

    def reach(self, length: int, last: int | None = None) -> int:
        largest = max(self.values) if self._from_values else self.high
        if self.curriculum == "linear":
            largest = max(largest, self.start[1])
        if self.curriculum == "step":
            largest = max(largest, 1.0)
        return math.ceil(largest * (length - 1 if last is None else last))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        own = {"step": key.per_step, "micro-batch": key.per_forward, "sample": lambda: key}[self.granularity]()
        if self.law == "cycling":
            alpha = self._value(own.turn(len(self.values)))
        elif self.law == "discrete":
            alpha = self._value(own.integers(0, len(self.values) - 1, slot=0))
        else:
            low, high = self._range(key)
            u = own.uniform(slot=0)
            alpha = low * (high / low) ** u if self.law == "log-uniform" else low + (high - low) * u
        if self.curriculum == "step" and key.progress is not None:
            alpha = torch.where(key.progress < self.until, 1.0, alpha)
        return {"alpha": alpha}

    def _value(self, which: torch.Tensor) -> torch.Tensor:
        """values[which], by comparisons: a table would have to be copied to the GPU."""
        alpha = torch.full_like(which, self.values[0], dtype=torch.float64)
        for number, value in enumerate(self.values[1:], 1):
            alpha = torch.where(which == number, value, alpha)
        return alpha

    def _range(self, key: DrawKey) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        if self.curriculum != "linear" or key.progress is None:
            return self.low, self.high
        low, high = self.start
        return low + (self.low - low) * key.progress, high + (self.high - high) * key.progress

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t * parameters["alpha"]
