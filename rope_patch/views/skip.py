"""The suffix of a document moves away from its prefix."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import MAX_INDEX, VIEWS, Parameters, View
from .laws import Law, Uniform, reach, require_integers, sample


@VIEWS.register("skip")
@dataclass(frozen=True)
class Skip(View):
    """r(t) = t for t < split and t + skip from there on: the suffix is far from the prefix.

    Both options are drawn anew for each document of L tokens, independently.

    Args:
        split: s, in tokens, below L, by default from U{0 .. L - 1}; 0 moves the whole document, which changes nothing.
        skip: y, in positions, by default from U{1 .. L}. Longer ones e.g. by LogUniform(1, 65536), in a recipe
            `{law: log-uniform, high: 65536}`; a negative skip moves the suffix back over the prefix.

    When: Take it first: short rows then train distances far beyond their length.

    Source: RPSD, arXiv:2604.14339, the skip view q(s, y); other laws than the uniform one, and curricula, are ours.
    """

    split: int | Law = Uniform(0)
    skip: int | Law = Uniform(1)

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_integers("view 'skip': split", self.split, least=0, most=MAX_INDEX)
        require_integers("view 'skip': skip", self.skip, least=-MAX_INDEX, most=MAX_INDEX)

    def check_length(self, length: int) -> None:
        if isinstance(self.split, int) and self.split >= length:
            raise ValueError(
                f"view 'skip': split must be below the number of tokens in the sequence, got split={self.split} for "
                f"{length} tokens. Use a smaller split, or leave it out to draw one within each document."
            )
        super().check_length(length)

    def reach(self, length: int, last: int | None = None) -> int:
        return (length - 1 if last is None else last) + max(reach(self.skip, length), 0)

    def largest_skip(self, length: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(self.skip, int) else torch.zeros_like(length) + reach(self.skip, length)

    def conditions(self) -> list[str]:
        return ["a fixed split must lie within documents"]

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {"split": sample(self.split, key, 0, length - 1), "skip": sample(self.skip, key, 1, length)}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if isinstance(self.split, int):
            return (t >= self.split).double()
        if self.split == Uniform(0):
            return t / length.double()  # s is one of 1 .. t
        return super().affected_share(t, length)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        if self.split == 0 or self.skip == 0:
            return torch.zeros_like(length, dtype=torch.bool)
        return length > (self.split if isinstance(self.split, int) else 1)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return torch.where(t >= parameters["split"], t + parameters["skip"], t)
