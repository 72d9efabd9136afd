"""The suffix of a document moves away from its prefix."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import MAX_INDEX, VIEWS, Parameters, View
from .laws import Law, Uniform, reach, sample
from .options import require_indexable, require_integers


@VIEWS.register("skip")
@dataclass(frozen=True)
class Skip(View):
    """r(t) = t for t < split and t + skip from there on: the suffix is read as if far behind the prefix.

    A law is drawn from anew for each document of L tokens, the two options independently.

    Args:
        split: s, in tokens, below L, by default one of 0 .. L - 1; at 0 the whole document would move, which RoPE does
            not see.
        skip: y, in positions, by default one of 1 .. L, others e.g. by LogUniform(1, 65536), in a recipe
            `{law: log-uniform, high: 65536}`; negative ones move the suffix back over the prefix.

    When: Take it first: short rows then show distances far beyond their own length.

    Source: RPSD, arXiv:2604.14339, the skip view q(s, y); other laws than the uniform one, and curricula, are ours.
    """

    split: int | Law = Uniform(0)
    skip: int | Law = Uniform(1)

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_integers(self, "split", self.split, 0)
        require_integers(self, "skip", self.skip, -MAX_INDEX)

    def check_length(self, length: int) -> None:
        if isinstance(self.split, int) and self.split >= length:
            raise ValueError(
                f"view 'skip': split must be below the number of tokens in the sequence, got split={self.split} for "
                f"{length} tokens. Use a smaller split, or leave it out to draw one within each document."
            )
        require_indexable(self, self.reach(length))

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
