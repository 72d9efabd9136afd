"""Positions as a sorted random sample of a longer range."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..base.validators import require_choice, require_integer
from .base import MAX_INDEX, VIEWS, Parameters, View

Granularity = Literal["step", "sample"]
Values = Literal["integers", "floats"]


@VIEWS.register("rpe")
@dataclass(frozen=True)
class RPE(View):
    """r(t) = the t-th smallest of L different integers, drawn uniformly from {0..max_index-1}, for L tokens.

    They are the first L of all integers in a random order, so they depend on the document's length alone and not on the
    rest of the batch. Under "floats" (RFS) they are L real numbers from U[0, max_index), independent and sorted. Tokens
    that are decoded after the L tokens follow one by one.

    Args:
        max_index: L_max, in positions, above the number of tokens of documents.
        granularity: which documents share the random order: those of a "step", where documents of equal length get
            equal indices, or none ("sample").
        values: what is drawn, "integers" or "floats".

    When: Take it as the baseline that PosAug is compared with.

    Source: randomized positional encodings, arXiv:2305.16843, and random float sampling (RFS), arXiv:2602.14050, in
        training alone; PosAug compares itself with the former, L_max of 16384 and 32768, and names the latter.
    """

    max_index: int = 16384
    granularity: Granularity = "step"
    values: Values = "integers"

    cites = (papers.RANDOMIZED_POSITIONS,)

    def __post_init__(self) -> None:
        require_integer("view 'rpe': max_index", self.max_index, least=2, most=MAX_INDEX)
        require_choice("view 'rpe': granularity", self.granularity, get_args(Granularity))
        require_choice("view 'rpe': values", self.values, get_args(Values))

    def cited(self) -> tuple[str, ...]:
        return (papers.RANDOM_FLOATS,) if self.values == "floats" else self.cites

    def check_length(self, length: int) -> None:
        if length > self.max_index:
            raise ValueError(
                f"view 'rpe': documents of {length} tokens have no {length} different indices below "
                f"max_index={self.max_index}. Use shorter rows or a larger max_index."
            )

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 1) & ((length < self.max_index) | (self.values == "floats"))

    def conditions(self) -> list[str]:
        return ["max_index must exceed the tokens of documents"]

    def reach(self, length: int, last: int | None = None) -> int:
        return self.max_index - (self.values == "integers") + (0 if last is None else max(last - length + 1, 0))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        slots = torch.arange(self.max_index, device=length.device)
        assert key.sample is not None
        if length.shape[-1] == 1:  # each row is one document
            sample, tokens = key.sample, length
            which = torch.arange(len(length), device=length.device)[:, None]
        else:
            samples, which = torch.unique(key.sample, return_inverse=True)
            sample = samples[:, None]
            tokens = torch.zeros_like(sample).index_put_((which.flatten(),), length.reshape(-1, 1))
        draw_key = key.per_step() if self.granularity == "step" else replace(key, sample=sample)
        # [max_index] where all documents of the step share the order, else [documents, max_index]
        if self.values == "floats":
            table = torch.where(slots < tokens, draw_key.uniform(slot=slots) * self.max_index, math.inf)
        else:  # all sets of the first L in a random order are equally likely
            table = torch.where(draw_key.rank(slots) < tokens, slots, self.max_index)
        table = table.sort(-1).values
        # one row of the table after the other; `_begin` is where the row of a token's document starts
        return {"_table": table.flatten(), "_begin": which * self.max_index, "_length": length}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if self.values == "floats":
            return (t >= 1).double()
        # unchanged up to t are samples whose first t + 1 integers are consecutive: C(N - t, L - t) of all C(N, L)
        n, t = length.double(), t.double()
        longest = torch.full_like(n, self.max_index)
        true = torch.lgamma(n + 1) - torch.lgamma(n - t + 1) + torch.lgamma(longest - t + 1) - torch.lgamma(longest + 1)
        return -torch.expm1(true)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        t = t.long()
        drawn = torch.minimum(t.clamp(min=0), parameters["_length"] - 1)
        return parameters["_table"][parameters["_begin"] + drawn] + (t - drawn)
