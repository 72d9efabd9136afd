"""Positions stretched or squeezed by a factor per document."""

import math
from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View
from .laws import Law, Uniform, reach, require_factors, sample, share_off


@VIEWS.register("dilation")
@dataclass(frozen=True)
class Dilation(View):
    """r(t) = c t, real-valued, with c drawn for each document.

    No rounding: for c < 1 it would give neighbouring tokens the same index.

    Args:
        factor: c, above 0, or its law.

    When: Take it as an ablation of the skip in self-distillation.

    Source: RPSD, arXiv:2604.14339, the random dilation of its view ablation.
    """

    factor: float | Law = Uniform(0.5, 2.0)

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_factors("view 'dilation': factor", self.factor)

    def reach(self, length: int, last: int | None = None) -> int:
        return math.ceil(reach(self.factor) * (length - 1 if last is None else last))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {"factor": sample(self.factor, key, 0)}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (t >= 1).double() * share_off(self.factor, 1)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 1) & (self.factor != 1)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t * parameters["factor"]
