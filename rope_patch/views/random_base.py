"""The base of RoPE drawn anew in every step."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..layout.documents import Documents
from .base import VIEWS, Parameters, View
from .laws import Law, Uniform, require_factors, sample, share_off


@VIEWS.register("random-base")
@dataclass(frozen=True)
class RandomBase(View):
    """r(t) = t, with the base B = c B_0, c drawn once for each optimizer step.

    Each frequency theta_j = B_0^(-2j / d), j = 0 .. d/2 - 1, is multiplied by c^(-2j / d).

    Args:
        factor: c, above 0, or its law. The paper does not name its law.

    When: Take it as an ablation of PosAug.

    Source: Position Augmentation (PosAug), FoGen 2026, its random-base ablation.
    """

    factor: float | Law = Uniform(1 / 8, 8.0)

    cites = (papers.POSAUG,)

    def __post_init__(self) -> None:
        require_factors("view 'random-base': factor", self.factor)

    @property
    def rescales(self) -> bool:
        return True

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {"base_factor": sample(self.factor, key.per_step(), 0)}

    def affected_from(self, t: torch.Tensor, documents: Documents, parameters: Parameters) -> torch.Tensor:
        # indices stay, angles change
        return torch.where(parameters["base_factor"] != 1, 1, documents.length)

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (t >= 1).double() * share_off(self.factor, 1)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 1) & (self.factor != 1)

    def frequencies(self, inv_freq: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        exponent = torch.arange(len(inv_freq), dtype=torch.float64, device=inv_freq.device) / len(inv_freq)  # 2j / d
        factor = parameters["base_factor"].to(inv_freq.device) ** -exponent
        return (inv_freq.double() * factor).to(inv_freq.dtype)

    def reach(self, length: int, last: int | None = None) -> int:
        return length - 1 if last is None else last

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t
