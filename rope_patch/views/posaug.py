"""Positions scaled by one random factor per optimizer step."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..draws import DrawKey
from .base import VIEWS, Parameters, View, require_indexable, require_range

Law = Literal["uniform", "log-uniform"]


@VIEWS.register("posaug")
@dataclass(frozen=True)
class PosAug(View):
    """r(t) = alpha t, real-valued, with one alpha ~ U[low, high] for each optimizer step.

    All sequences, gradient-accumulation micro-steps, ranks and layers of a step share the alpha. Scaling positions by
    alpha is scaling all frequencies by alpha, so a step with alpha > 1 trains on angles of a window alpha times longer.

    Args:
        low: smallest alpha, above 0.
        high: largest alpha, at least low; low = high fixes alpha.
        law: "uniform" on [low, high], or "log-uniform": exp U[ln low, ln high]. Under "uniform" only 11 % of the steps
            have alpha < 1 at the default range.

    Source: Position Augmentation (PosAug), FoGen 2026; the default range is that of its main results.
    """

    low: float = 1 / 8
    high: float = 8.0
    law: Law = "uniform"

    def __post_init__(self) -> None:
        require_range(self, self.low, self.high)
        if self.law not in get_args(Law):
            raise ValueError(f"view 'posaug': law must be one of {get_args(Law)}, got {self.law!r}.")

    def check_length(self, length: int) -> None:
        require_indexable(self, self.high * (length - 1))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        u = key.per_step().uniform(slot=0)
        if self.law == "log-uniform":
            return {"alpha": torch.exp(math.log(self.low) + math.log(self.high / self.low) * u)}
        return {"alpha": self.low + (self.high - self.low) * u}

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t * parameters["alpha"]
