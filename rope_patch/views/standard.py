"""The view that changes nothing."""

from dataclasses import dataclass

import torch

from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View


@VIEWS.register("standard")
@dataclass(frozen=True)
class Standard(View):
    """r(t) = t: the positions that the model was trained with.

    When: Take it to train at true positions; it is the default.

    Source: RoPE, arXiv:2104.09864.
    """

    perturbs = False
    synonyms = ("rope", "default", "none", "plain")

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(t, dtype=torch.float64)

    def reach(self, length: int, last: int | None = None) -> int:
        return length - 1 if last is None else last

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t
