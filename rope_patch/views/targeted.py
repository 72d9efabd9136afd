"""What views that spread documents over a fixed window have in common."""

import torch

from .base import View
from .options import require_reach


class Targeted(View):
    """Base of views that move the n tokens of a document to positions 0 .. L - 1, L the option `target`, n <= L."""

    target: int

    def check_length(self, length: int) -> None:
        require_reach(self, length, self.target)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 1) & (length < self.target)

    def conditions(self) -> list[str]:
        return ["a target must lie beyond documents"]

    def reach(self, length: int, last: int | None = None) -> int:
        return (length - 1 if last is None else last) + max(self.target - length, 0)

    def targets(self) -> list[tuple[str, int]]:
        return [(self.name, self.target)]
