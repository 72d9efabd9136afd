"""Head and tail of a document at both ends of a long window, its middle anywhere between them."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..base.validators import require_number
from .base import VIEWS, Parameters
from .targeted import Targeted


@VIEWS.register("cream")
@dataclass(frozen=True)
class Cream(Targeted):
    """r(t) = t for the first h of a document's n tokens, t + L - n for its last h, and t + e - (n - h - 1) between.

    e is the index of the middle's last token, n - h - 1 where it is contiguous with the head, L - h - 1 with the tail.
    With f = floor(L / n):

    - h is floor(n / 3) or 4 f, with probability 1/2 each, at most n / 3.
    - a = floor(x), x ~ N(1 + f, sigma) clamped to [2, 2 f], and e ~ U{floor(h + (n - 2 h - 1) a / 2) ..
      floor(n a / 2) - h - 1}. a = 2 moves nothing and 2 f leaves the most room; the middle of the window is the most
      frequent place (CREAM, LongReD-C).
    - With sigma=None, e ~ U{n - h .. L - h - 1} (LongReD-U).

    Args:
        target: L, in positions.
        sigma: standard deviation in units of n / 2, or None; LongReD's code has 5 and CREAM's 3, both for a fixed f.

    When: Take it to reproduce CREAM, or LongReD with objective 'hidden-distill'.

    Source: CREAM, arXiv:2406.07138, and LongReD, arXiv:2502.07365. As in their code, x is clamped, not drawn again as
        for a truncated law. Both draw h once a batch and take n to be the native window and L = f n. Here h is drawn
        for each document, n is the document's length, and the tail ends at L - 1.
    """

    target: int
    sigma: float | None = 5.0

    cites = (papers.CREAM,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma is not None:
            require_number("view 'cream': sigma", self.sigma)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 2) & (length < self.target)  # of two tokens neither is an end

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        factor, third = self.target // length, length // 3
        ends = torch.where(key.integers(0, 1, slot=0) == 0, third, torch.minimum(4 * factor, third))
        contiguous = length - ends - 1  # e of a middle that follows the head
        if self.sigma is None:
            highest = self.target - ends - 1
            last = key.integers(torch.minimum(contiguous + 1, highest), highest, slot=2)
        else:
            u = key.uniform(slot=1).clamp(min=2.0**-54)  # of which the normal quantile is finite
            x = 1 + factor + self.sigma * torch.special.ndtri(u)
            a = torch.minimum(x.clamp(min=2), 2.0 * factor).clamp(min=2).floor().long()
            lowest = ends + (length - 2 * ends - 1) * a // 2
            last = key.integers(lowest, torch.maximum(length * a // 2 - ends - 1, lowest), slot=2)
        return {
            "head": ends,
            "tail": length - ends,
            "skip": torch.where(ends > 0, last - contiguous, 0),
            "_far": self.target - length,
        }

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        middle = torch.where(t >= parameters["head"], t + parameters["skip"], t)
        return torch.where(t >= parameters["tail"], t + parameters["_far"], middle)
