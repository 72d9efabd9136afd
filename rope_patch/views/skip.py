"""The suffix of a document moves away from its prefix."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import MAX_INDEX, VIEWS, Parameters, View
from .options import require_choice, require_effect, require_indexable, require_int, require_share, settle

Law = Literal["uniform", "log-uniform"]
Curriculum = Literal["linear", "step"]


@VIEWS.register("skip")
@dataclass(frozen=True)
class Skip(View):
    """r(t) = t for t < split and t + skip from there on: the suffix is read as if far behind the prefix.

    What is None is drawn anew for each document of L tokens: split ~ U{0..L-1} and skip ~ U{1..max_skip}, integers,
    independent of each other. Largest index: L - 1 + max_skip.

    Args:
        split: s, in tokens, 0 < s < L: from 0 on the whole document would move, which RoPE does not see. A drawn s of 0
            leaves a document as it is, and counts as any other draw, as in the paper.
        skip: y, in positions, not 0; negative ones move the suffix back over the prefix.
        max_skip: Y, in positions, at least 1; None means L of each document, as in the paper's main runs.
        law: of y: "uniform", or "log-uniform", P(y) = ln(1 + 1 / y) / ln(Y + 1), which gives each doubling of the skip
            the same share.
        curriculum: by the progress p of training, from 0 to 1: "linear" moves Y from `start`, at p = 0, to max_skip, at
            p = 1; "step" keeps Y = `start` until p = `until`. p comes from `RopeSFTTrainer`, elsewhere from whoever
            sets the clock of the model's `view_source`.
        start: of a curriculum, Y at the start, at least 0; 0, the default, skips nothing.
        until: of "step", the share of training before its range, 0.5 by default.

    When: Take it first: short rows then show distances far beyond their own length.

    Source: RPSD, arXiv:2604.14339, the skip view q(s, y); law and curricula are ours, after PosAug's.
    """

    split: int | None = None
    skip: int | None = None
    max_skip: int | None = None
    law: Law = "uniform"
    curriculum: Curriculum | None = None
    start: int | None = None
    until: float | None = None

    conditional = ("start", "until")

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_int(self, "split", self.split, 0)
        require_int(self, "skip", self.skip, -MAX_INDEX)
        require_int(self, "max_skip", self.max_skip, 1)
        require_int(self, "start", self.start, 0)
        require_choice(self, "law", self.law, get_args(Law))
        require_choice(self, "curriculum", self.curriculum, (*get_args(Curriculum), None))
        if self.skip is not None and (self.law != "uniform" or self.curriculum is not None):
            raise ValueError(
                "view 'skip': law and curriculum are of the draw that a fixed skip replaces: leave out skip."
            )
        if self.skip is not None and self.max_skip is not None:
            raise ValueError(
                f"view 'skip': give skip or max_skip, not both, got skip={self.skip} and max_skip={self.max_skip}. "
                "max_skip bounds the draw that a fixed skip replaces."
            )
        settle(self, "start", 0, read=self.curriculum is not None, by="a curriculum")
        settle(self, "until", 0.5, read=self.curriculum == "step", by="curriculum='step'")
        if self.until is not None:
            require_share(self, "until", self.until)
        require_effect(
            self,
            self.split != 0,
            "split must be at least 1 or None, got 0: it moves the whole document, which RoPE does not see.",
        )
        require_effect(self, self.skip != 0, "skip=0 moves nothing: give another, or None to draw one.")
        require_effect(
            self,
            self.law == "uniform" or self.max_skip != 1,
            f"law={self.law!r} says nothing where max_skip=1 leaves one skip to draw: leave it out.",
        )
        require_effect(
            self,
            self.curriculum is None or self.start != self.max_skip,
            f"curriculum={self.curriculum!r} goes from start={self.start} to an equal max_skip: leave it out.",
        )

    @property
    def follows_progress(self) -> bool:
        return self.curriculum is not None

    def check_length(self, length: int) -> None:
        if self.split is not None and self.split >= length:
            raise ValueError(
                f"view 'skip': split must be below the number of tokens in the sequence, got split={self.split} for "
                f"{length} tokens. Use a smaller split, or None to draw one within each document."
            )
        require_indexable(self, self.reach(length))

    def reach(self, length: int, last: int | None = None) -> int:
        farthest = self.skip if self.skip is not None else max(self.max_skip or length, self.start or 0)
        return (length - 1 if last is None else last) + max(farthest, 0)

    def largest_skip(self, length: torch.Tensor) -> torch.Tensor | None:
        if self.skip is not None:
            return None
        return self._last_skip(length).clamp(min=self.start or 0)

    def _last_skip(self, length: torch.Tensor) -> torch.Tensor:
        """Y, to which a curriculum goes."""
        return length if self.max_skip is None else torch.full_like(length, self.max_skip)

    def conditions(self) -> list[str]:
        return ["a fixed split must lie within documents"]

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        split = key.integers(0, length - 1, slot=0) if self.split is None else torch.full_like(length, self.split)
        if self.skip is not None:
            return {"split": split, "skip": torch.full_like(length, self.skip)}
        largest = self._largest(length, key)
        if self.law == "uniform":
            return {"split": split, "skip": torch.where(largest > 0, key.integers(1, largest.clamp(min=1), slot=1), 0)}
        # floor((Y + 1)^u), kept within Y against rounding
        drawn = (largest.double() + 1).pow(key.uniform(slot=1)).long()
        return {"split": split, "skip": torch.minimum(drawn, largest)}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if self.split is not None:
            return (t >= self.split).double()
        return t / length.double()  # s is one of 1 .. t

    def _largest(self, length: torch.Tensor, key: DrawKey) -> torch.Tensor:
        """Y of each document at this point of training."""
        largest = self._last_skip(length)
        if self.curriculum is None or key.progress is None:
            return largest
        assert self.start is not None
        if self.until is not None:
            return torch.where(key.progress < self.until, self.start, largest)
        return torch.lerp(torch.full_like(largest, self.start).double(), largest.double(), key.progress).long()

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return length > (1 if self.split is None else self.split)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return torch.where(t >= parameters["split"], t + parameters["skip"], t)
