"""Positions stretched or squeezed by a factor per document."""

import math
from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View
from .options import require_effect, require_indexable, require_range


@VIEWS.register("dilation")
@dataclass(frozen=True)
class Dilation(View):
    """r(t) = c t, real-valued, with c ~ U[low, high] drawn for each document.

    No rounding: for c < 1 it would give neighbouring tokens the same index.

    Args:
        low: smallest factor, above 0.
        high: largest factor, at least low; low = high fixes c, at another number than 1.

    When: Take it as an ablation of the skip in self-distillation.

    Source: RPSD, arXiv:2604.14339, the random dilation of its view ablation.
    """

    low: float = 0.5
    high: float = 2.0

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_range(self, self.low, self.high)
        require_effect(self, (self.low, self.high) != (1, 1), "low=1 and high=1 stretch nothing: widen the range.")

    def check_length(self, length: int) -> None:
        require_indexable(self, self.high * (length - 1))

    def reach(self, length: int, last: int | None = None) -> int:
        return math.ceil(self.high * (length - 1 if last is None else last))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {"factor": self.low + (self.high - self.low) * key.uniform(slot=0)}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (t >= 1).double()

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t * parameters["factor"]
