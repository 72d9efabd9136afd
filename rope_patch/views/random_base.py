"""The base of RoPE drawn anew in every step."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..layout.documents import Documents
from .base import VIEWS, Parameters, View
from .options import require_choice, require_effect, require_range

Law = Literal["uniform", "log-uniform"]


@VIEWS.register("random-base")
@dataclass(frozen=True)
class RandomBase(View):
    """r(t) = t, with the base B = c B_0, c ~ U[low, high], one draw for each optimizer step.

    Each frequency theta_j of the RoPE parameters in force, j = 0 .. d/2 - 1, is multiplied by c^(-2j / d), which is
    what another base does to B_0^(-2j / d).

    Args:
        low: smallest c, above 0.
        high: largest c, at least low; low = high fixes the base, at another c than 1.
        law: "uniform" on [low, high], or "log-uniform". The paper does not say which it takes.

    When: Take it as an ablation of PosAug.

    Source: Position Augmentation (PosAug), FoGen 2026, its random-base ablation.
    """

    low: float = 1 / 8
    high: float = 8.0
    law: Law = "uniform"

    cites = (papers.POSAUG,)

    def __post_init__(self) -> None:
        require_range(self, self.low, self.high)
        require_choice(self, "law", self.law, get_args(Law))
        require_effect(self, (self.low, self.high) != (1, 1), "low=1 and high=1 keep the base: widen the range.")
        require_effect(
            self,
            self.law == "uniform" or self.low != self.high,
            f"law={self.law!r} says nothing where low and high are equal: leave it out.",
        )

    @property
    def rescales(self) -> bool:
        return True

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        u = key.per_step().uniform(slot=0)
        if self.law == "log-uniform":
            return {"base_factor": self.low * (self.high / self.low) ** u}
        return {"base_factor": self.low + (self.high - self.low) * u}

    def affected_from(self, t: torch.Tensor, documents: Documents, parameters: Parameters) -> torch.Tensor:
        # angles, not indices, are others than the true ones
        return torch.where(parameters["base_factor"] != 1, 1, documents.length)

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (t >= 1).double()

    def frequencies(self, inv_freq: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        exponent = torch.arange(len(inv_freq), dtype=torch.float64, device=inv_freq.device) / len(inv_freq)
        factor = parameters["base_factor"].to(inv_freq.device) ** -exponent
        return (inv_freq.double() * factor).to(inv_freq.dtype)

    def reach(self, length: int, last: int | None = None) -> int:
        return length - 1 if last is None else last

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t
