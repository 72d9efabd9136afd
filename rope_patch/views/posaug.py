"""Positions scaled by one random factor per optimizer step."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View
from .laws import Cycling, Law, Uniform, reach, sample, share_off
from .options import require_choice, require_factors, require_indexable

Granularity = Literal["step", "micro-batch", "sample"]


@VIEWS.register("posaug")
@dataclass(frozen=True)
class PosAug(View):
    """r(t) = alpha t, real-valued, with one alpha for each optimizer step.

    All sequences, gradient-accumulation micro-steps, ranks and layers of a step share the alpha. Scaling positions by
    alpha is scaling all frequencies by alpha, so a step with alpha > 1 trains on angles of a window alpha times longer.

    Args:
        alpha: a factor above 0, or its law, in a recipe `{law: log-uniform, low: 0.125, high: 8}`. Under the default,
            U[1/8, 8], only 11 % of the steps have alpha < 1.
        granularity: what shares an alpha: a "step", a "micro-batch" or a "sample", that is, a document. A micro-batch
            is the documents of one forward, known by the first of them: it alone depends on how a step is divided into
            micro-batches and over ranks.

    When: Take it while a model is trained from scratch, so that its loss does not rise beyond its window.

    Source: Position Augmentation (PosAug), FoGen 2026; the default is the law of its main results, the other laws and
        the curricula are those of its ablations, granularity is ours.
    """

    alpha: float | Law = Uniform(1 / 8, 8.0)
    granularity: Granularity = "step"

    cites = (papers.POSAUG,)

    def __post_init__(self) -> None:
        require_factors(self, "alpha", self.alpha)
        require_choice(self, "granularity", self.granularity, get_args(Granularity))
        if isinstance(getattr(self.alpha, "law", self.alpha), Cycling) and self.granularity != "step":
            raise ValueError(
                f"view 'posaug': law 'cycling' goes by steps, got granularity={self.granularity!r}: leave it out, or "
                "take 'discrete'."
            )

    @property
    def draws_by_forward(self) -> bool:
        return self.granularity == "micro-batch"

    def check_length(self, length: int) -> None:
        require_indexable(self, max(self.reach(length), length - 1))

    def reach(self, length: int, last: int | None = None) -> int:
        return math.ceil(reach(self.alpha) * (length - 1 if last is None else last))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        draw_key = {"step": key.per_step, "micro-batch": key.per_forward, "sample": lambda: key}[self.granularity]()
        return {"alpha": sample(self.alpha, draw_key, 0)}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return (t >= 1).double() * share_off(self.alpha, 1)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return (length > 1) & (self.alpha != 1)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t * parameters["alpha"]
