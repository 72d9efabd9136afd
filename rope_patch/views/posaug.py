"""Positions scaled by one random factor per optimizer step."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..base.validators import require_choice
from .base import VIEWS, Parameters, View
from .laws import Cycling, Law, Uniform, reach, require_factors, sample, share_off

Granularity = Literal["step", "micro-batch", "sample"]


@VIEWS.register("posaug")
@dataclass(frozen=True)
class PosAug(View):
    """r(t) = alpha t, real-valued, with one alpha for each optimizer step.

    All sequences, micro-batches, ranks and layers of a step share alpha. Scaling positions scales all frequencies, so a
    step with alpha > 1 trains on the angles of a window alpha times as long.

    Args:
        alpha: a factor above 0, or its law, in a recipe `{law: log-uniform, low: 0.125, high: 8}`. Under the default,
            U[1/8, 8], only 11 % of the steps have alpha < 1.
        granularity: which documents share an alpha: those of a "step", those of a "micro-batch" (one forward), or none
            ("sample"). Draws for a micro-batch depend on how a step is split into micro-batches and over ranks.

    When: Take it while a model is trained from scratch, so that its loss does not rise beyond its window.

    Source: Position Augmentation (PosAug), FoGen 2026. The default is the law of its main results; the other laws and
        the curricula are from its ablations; granularity is ours.
    """

    alpha: float | Law = Uniform(1 / 8, 8.0)
    granularity: Granularity = "step"

    cites = (papers.POSAUG,)

    def __post_init__(self) -> None:
        require_factors("view 'posaug': alpha", self.alpha)
        require_choice("view 'posaug': granularity", self.granularity, get_args(Granularity))
        # a curriculum has the law that it leads to as `law`
        if isinstance(getattr(self.alpha, "law", self.alpha), Cycling) and self.granularity != "step":
            raise ValueError(
                f"view 'posaug': law 'cycling' has one value a step, got granularity={self.granularity!r}: leave "
                "granularity out, or use law 'discrete'."
            )

    @property
    def draws_by_forward(self) -> bool:
        return self.granularity == "micro-batch"

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
