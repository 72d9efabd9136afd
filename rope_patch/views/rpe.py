"""Positions as a sorted random sample of a longer range."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View
from .options import require_choice, require_int

Granularity = Literal["step", "sample"]


@VIEWS.register("rpe")
@dataclass(frozen=True)
class RPE(View):
    """r(t) = the t-th smallest of L different integers, drawn uniformly from {0..max_index-1}, for L tokens.

    They are the first L of all integers in a random order, so that they depend on the document's own length alone, and
    not on what else is in the batch. Tokens that are decoded behind the L tokens follow on one by one.

    Args:
        max_index: L_max, in positions; more than the tokens of documents, or there is nothing to choose.
        granularity: what shares an order of the integers: a "step", in which documents of equal length have equal
            indices, or a "sample", that is, a document.

    When: Take it as the baseline that PosAug is compared with.

    Source: randomized positional encodings, arXiv:2305.16843, as PosAug compares itself with; its L_max are 16384 and
        32768.
    """

    max_index: int = 16384
    granularity: Granularity = "step"

    cites = (papers.RANDOMIZED_POSITIONS,)

    def __post_init__(self) -> None:
        require_int(self, "max_index", self.max_index, 2)
        require_choice(self, "granularity", self.granularity, get_args(Granularity))

    def check_length(self, length: int) -> None:
        if length > self.max_index:
            raise ValueError(
                f"view 'rpe': documents of {length} tokens have no {length} different indices below "
                f"max_index={self.max_index}. Use shorter rows or a larger max_index."
            )

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 1) & (length < self.max_index)

    def conditions(self) -> list[str]:
        return ["max_index must exceed the tokens of documents"]

    def reach(self, length: int, last: int | None = None) -> int:
        return self.max_index - 1 + (0 if last is None else max(last - length + 1, 0))

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
        # one number an integer, by which all are put in order: every set of the first ones is as likely
        order = draw_key.uniform(slot=slots).sort(dim=-1, stable=True).indices
        rank = torch.empty_like(order).scatter_(-1, order, slots.expand_as(order))
        table = torch.where(rank < tokens, slots, self.max_index).sort(-1).values
        return {"_table": table.flatten(), "_begin": which * self.max_index, "_length": length}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        # true up to t are samples that begin with t + 1 integers in a row: C(N - t, L - t) of all C(N, L)
        n, t = length.double(), t.double()
        longest = torch.full_like(n, self.max_index)
        true = torch.lgamma(n + 1) - torch.lgamma(n - t + 1) + torch.lgamma(longest - t + 1) - torch.lgamma(longest + 1)
        return -torch.expm1(true)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        t = t.long()
        drawn = torch.minimum(t.clamp(min=0), parameters["_length"] - 1)
        return parameters["_table"][parameters["_begin"] + drawn] + (t - drawn)
