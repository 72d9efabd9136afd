"""Positions as a sorted random sample of a longer range."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from ..draws import DrawKey
from .base import VIEWS, Parameters, View, require_choice, require_int

Granularity = Literal["step", "sample"]


@VIEWS.register("rpe")
@dataclass(frozen=True)
class RPE(View):
    """r(t) = the t-th smallest of L different integers, drawn uniformly from {0..max_index-1}, L the longest document.

    A document of fewer tokens than the longest of its forward reads the first of them.

    Args:
        max_index: L_max, in positions; at least the tokens of every document.
        granularity: what shares a sample of integers: a "step" or a "sample", that is, a document.

    Source: randomized positional encodings, arXiv:2305.16843, as PosAug compares itself with; its L_max are 16384 and
        32768.
    """

    max_index: int = 16384
    granularity: Granularity = "step"

    def __post_init__(self) -> None:
        require_int(self, "max_index", self.max_index, 2)
        require_choice(self, "granularity", self.granularity, get_args(Granularity))

    def check_length(self, length: int) -> None:
        if length > self.max_index:
            raise ValueError(
                f"view 'rpe': documents of {length} tokens have no {length} different indices below "
                f"max_index={self.max_index}. Use shorter rows or a larger max_index."
            )

    def reach(self, length: int, last: int | None = None) -> int:
        return self.max_index - 1 + (0 if last is None else max(last - length + 1, 0))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        slots = torch.arange(self.max_index, device=length.device)
        if self.granularity == "step":
            own, which = key.per_step(), torch.zeros_like(length)
        else:
            documents, which = torch.unique(key.sample, return_inverse=True)
            own = replace(key, sample=documents[:, None])
        # one number a slot, of which the smallest choose: every set of slots is as likely
        numbers = own.uniform(slot=slots).view(-1, self.max_index)
        rank = torch.empty_like(slots.expand_as(numbers)).scatter_(1, numbers.argsort(-1), slots.expand_as(numbers))
        longest = length.max()
        table = torch.where(rank < longest, slots, self.max_index).sort(-1).values
        return {"_table": table.flatten(), "_begin": which * self.max_index, "_longest": longest}

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        t = t.long()
        drawn = torch.minimum(t.clamp(min=0), parameters["_longest"] - 1)
        # tokens that are decoded later follow on
        return parameters["_table"][parameters["_begin"] + drawn] + (t - drawn)
