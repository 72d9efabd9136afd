"""No positions."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View


@VIEWS.register("nope")
@dataclass(frozen=True)
class NoPE(View):
    """r(t) = 0: every pair of tokens is at distance 0, only the causal mask tells their order.

    When: Take it as an ablation of the skip in self-distillation.

    Source: RPSD, arXiv:2604.14339, the NoPE view of its ablation.
    """

    cites = (papers.RPSD,)

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (t >= 1).double()

    def reach(self, length: int, last: int | None = None) -> int:
        return 0

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return torch.zeros_like(t)
