"""Base of views that spread documents over a fixed window."""

import torch

from ..base.validators import require_integer
from .base import MAX_INDEX, View


class Targeted(View):
    """Base of views that move the n tokens of a document to positions 0 .. L - 1, with the option `target` L >= n."""

    target: int

    def __post_init__(self) -> None:
        require_integer(f"view {self.name!r}: target", self.target, least=2, most=MAX_INDEX)

    def check_length(self, length: int) -> None:
        if length > self.target:
            raise ValueError(
                f"view {self.name!r}: documents of {length} tokens reach beyond target={self.target}. Use shorter rows "
                "or a larger target."
            )

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 1) & (length < self.target)

    def conditions(self) -> list[str]:
        return ["target must exceed the tokens of documents"]

    def reach(self, length: int, last: int | None = None) -> int:
        return (length - 1 if last is None else last) + max(self.target - length, 0)

    def targets(self) -> list[tuple[str, int]]:
        return [(self.name, self.target)]
