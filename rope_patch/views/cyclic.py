"""Positions rotated within the document, so that it starts at another index."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import MAX_INDEX, VIEWS, Parameters, View
from .laws import Law, Uniform, require_integers, sample


@VIEWS.register("cyclic")
@dataclass(frozen=True)
class Cyclic(View):
    """r(t) = (t + shift) mod L for a document of L tokens; attention stays causal in token order.

    RoPE does not see a constant, so this is a skip with split L - shift and skip -L. Tokens that are decoded after the
    L tokens continue the suffix: r(t) = t + shift - L.

    Args:
        shift: u, in positions, or its law for each document, by default U{0..L-1}.

    When: Take it as an ablation of the skip in self-distillation.

    Source: RPSD, arXiv:2604.14339, the cyclic view q(u).
    """

    shift: int | Law = Uniform(0)

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_integers("view 'cyclic': shift", self.shift, least=0, most=MAX_INDEX)

    def reach(self, length: int, last: int | None = None) -> int:
        return length - 1 if last is None else last

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {"shift": sample(self.shift, key, 0, length - 1) % length, "length": length}

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return self.shift % length != 0 if isinstance(self.shift, int) else length > 1

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if isinstance(self.shift, int):
            return (t >= length - self.shift % length).double()
        if self.shift == Uniform(0):
            return t / length.double()  # u is one of L - t .. L - 1
        return super().affected_share(t, length)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        turned = t + parameters["shift"]
        return torch.where(turned < parameters["length"], turned, turned - parameters["length"])
