"""The suffix of a document moves away from its prefix."""

from dataclasses import dataclass

import torch

from ..draws import DrawKey
from .base import MAX_INDEX, VIEWS, Parameters, View, require_indexable, require_int


@VIEWS.register("skip")
@dataclass(frozen=True)
class Skip(View):
    """r(t) = t for t < split and t + skip from there on: the suffix is read as if far behind the prefix.

    What is None is drawn anew for each document of L tokens: split ~ U{0..L-1} and skip ~ U{1..max_skip}, integers,
    independent of each other. Largest index: L - 1 + max_skip.

    Args:
        split: s, in tokens, 0 <= s < L.
        skip: y, in positions; negative ones move the suffix back over the prefix.
        max_skip: Y, in positions, at least 1; None means L of each document, as in the paper's main runs.

    Source: RPSD, arXiv:2604.14339, the skip view q(s, y).
    """

    split: int | None = None
    skip: int | None = None
    max_skip: int | None = None

    def __post_init__(self) -> None:
        require_int(self, "split", self.split, 0)
        require_int(self, "skip", self.skip, -MAX_INDEX)
        require_int(self, "max_skip", self.max_skip, 1)
        if self.skip is not None and self.max_skip is not None:
            raise ValueError(
                f"view 'skip': give skip or max_skip, not both, got skip={self.skip} and max_skip={self.max_skip}. "
                "max_skip bounds the draw that a fixed skip replaces."
            )

    def check_length(self, length: int) -> None:
        if self.split is not None and self.split >= length:
            raise ValueError(
                f"view 'skip': split must be below the number of tokens in the sequence, got split={self.split} for "
                f"{length} tokens. Use a smaller split, or None to draw one within each document."
            )
        require_indexable(self, length - 1 + max(self.skip if self.skip is not None else self.max_skip or length, 0))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        split = key.integers(0, length - 1, slot=0) if self.split is None else torch.full_like(key.sample, self.split)
        if self.skip is not None:
            return {"split": split, "skip": torch.full_like(key.sample, self.skip)}
        return {"split": split, "skip": key.integers(1, length if self.max_skip is None else self.max_skip, slot=1)}

    def affected_from(self, length: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return parameters["split"]

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return torch.where(t >= parameters["split"], t + parameters["skip"], t)
