"""Positions scaled by one random factor per optimizer step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View
from .options import (
    require_choice,
    require_effect,
    require_indexable,
    require_numbers,
    require_range,
    require_share,
    settle,
)

Law = Literal["uniform", "log-uniform", "discrete", "cycling"]
Granularity = Literal["step", "micro-batch", "sample"]
Curriculum = Literal["linear", "step"]


@VIEWS.register("posaug")
@dataclass(frozen=True)
class PosAug(View):
    """r(t) = alpha t, real-valued, with one alpha ~ U[low, high] for each optimizer step.

    All sequences, gradient-accumulation micro-steps, ranks and layers of a step share the alpha. Scaling positions by
    alpha is scaling all frequencies by alpha, so a step with alpha > 1 trains on angles of a window alpha times longer.

    Args:
        low: smallest alpha, above 0, 1/8 by default; of laws that have a range.
        high: largest alpha, at least low, 8 by default; low = high fixes alpha, at another number than 1.
        law: "uniform" on [low, high]; "log-uniform", exp U[ln low, ln high]; "discrete", one of `values`; "cycling",
            `values` in turn, by the optimizer step. Under "uniform" only 11 % of the steps have alpha < 1 at the
            default range.
        values: alphas of "discrete" and "cycling", 1, 2, 4 and 8 by default.
        granularity: what shares an alpha: a "step", a "micro-batch" or a "sample", that is, a document. A micro-batch
            is the documents of one forward, known by the first of them: it alone depends on how a step is divided into
            micro-batches and over ranks.
        curriculum: by the progress p of training, from 0 to 1: "linear" moves the range from `start`, at p = 0, to
            [low, high], at p = 1; "step" keeps alpha = 1 until p = `until`. None has neither. p comes from
            `RopeSFTTrainer`, elsewhere from whoever sets the clock of the model's `view_source`.
        start: [low, high] of "linear" at the start, [0.5, 2] by default.
        until: of "step", the share of training before its range, 0.5 by default.

    When: Take it while a model is trained from scratch, so that its loss does not rise beyond its window.

    Source: Position Augmentation (PosAug), FoGen 2026; the default range is that of its main results, laws and
        curricula are those of its ablations, granularity is ours.
    """

    low: float | None = None
    high: float | None = None
    law: Law = "uniform"
    values: Sequence[float] | None = None
    granularity: Granularity = "step"
    curriculum: Curriculum | None = None
    start: Sequence[float] | None = None
    until: float | None = None

    conditional = ("low", "high", "values", "start", "until")

    cites = (papers.POSAUG,)

    def __post_init__(self) -> None:
        require_choice(self, "law", self.law, get_args(Law))
        require_choice(self, "granularity", self.granularity, get_args(Granularity))
        require_choice(self, "curriculum", self.curriculum, (*get_args(Curriculum), None))
        self._settle_options()
        if self.values is not None:
            object.__setattr__(self, "values", require_numbers(self, "values", self.values))  # a list, from JSON
            if not self.values:
                raise ValueError("view 'posaug': values must hold at least one alpha, got ().")
        else:
            require_range(self, self.low, self.high)
        if self.start is not None:
            object.__setattr__(self, "start", require_numbers(self, "start", self.start))
            if len(self.start) != 2:
                raise ValueError(f"view 'posaug': start must be [low, high], got {self.start}.")
            require_range(self, *self.start)
        if self.until is not None:
            require_share(self, "until", self.until)
        if self.law == "cycling" and self.granularity != "step":
            raise ValueError(f"view 'posaug': 'cycling' goes by steps, got granularity={self.granularity!r}.")
        if self._from_values and self.curriculum == "linear":
            raise ValueError(f"view 'posaug': curriculum 'linear' moves a range, which law {self.law!r} does not have.")
        self._require_effects()

    def _settle_options(self) -> None:
        for name, default in (("low", 1 / 8), ("high", 8.0)):
            settle(self, name, default, read=not self._from_values, by="law='uniform' or 'log-uniform'")
        settle(self, "values", (1.0, 2.0, 4.0, 8.0), read=self._from_values, by="law='discrete' or 'cycling'")
        settle(self, "start", (0.5, 2.0), read=self.curriculum == "linear", by="curriculum='linear'")
        settle(self, "until", 0.5, read=self.curriculum == "step", by="curriculum='step'")

    def _require_effects(self) -> None:
        ends = (self.low, self.high)
        require_effect(
            self,
            self.start != ends,
            f"curriculum='linear' goes from start={self.start} to an equal range: leave it out.",
        )
        ranges = [self.values or ends, self.start or self.values or ends]
        alphas = {alpha for bounds in ranges for alpha in bounds}
        require_effect(self, alphas != {1}, "every alpha is 1, which scales nothing: widen the range.")
        if all(len(set(bounds)) == 1 for bounds in ranges):
            useless = {"granularity": self.granularity != "step", "law": self.law == "log-uniform"}
            for name, value in useless.items():
                require_effect(
                    self,
                    not value,
                    f"{name}={getattr(self, name)!r} says nothing where no alpha is drawn, as they are all equal: "
                    "leave it out.",
                )

    @property
    def follows_progress(self) -> bool:
        return self.curriculum is not None

    @property
    def draws_by_forward(self) -> bool:
        return self.granularity == "micro-batch"

    @property
    def _from_values(self) -> bool:
        return self.law in ("discrete", "cycling")

    def check_length(self, length: int) -> None:
        require_indexable(self, max(self.reach(length), length - 1))

    def reach(self, length: int, last: int | None = None) -> int:
        alphas = [*(self.values or ()), *(self.start or ())]
        alphas += [] if self.high is None else [self.high]
        alphas += [] if self.until is None else [1.0]
        return math.ceil(max(alphas) * (length - 1 if last is None else last))

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        draw_key = {"step": key.per_step, "micro-batch": key.per_forward, "sample": lambda: key}[self.granularity]()
        if self.values is not None:
            n = len(self.values)
            which = draw_key.turn(n) if self.law == "cycling" else draw_key.integers(0, n - 1, slot=0)
            alpha = _chosen(self.values, which)
        else:
            low, high = self._range(key)
            u = draw_key.uniform(slot=0)
            alpha = low * (high / low) ** u if self.law == "log-uniform" else low + (high - low) * u
        if self.until is not None and key.progress is not None:
            alpha = torch.where(key.progress < self.until, 1.0, alpha)
        return {"alpha": alpha}

    def _range(self, key: DrawKey) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        assert self.low is not None and self.high is not None
        if self.start is None or key.progress is None:
            return self.low, self.high
        low, high = self.start
        return low + (self.low - low) * key.progress, high + (self.high - high) * key.progress

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        others = 1.0 if self.values is None else sum(value != 1 for value in self.values) / len(self.values)
        return (t >= 1).double() * others

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t * parameters["alpha"]


def _chosen(values: Sequence[float], which: torch.Tensor) -> torch.Tensor:
    """values[which], by comparisons: a table would have to be copied to the GPU."""
    alpha = torch.full_like(which, values[0], dtype=torch.float64)
    for number, value in enumerate(values[1:], 1):
        alpha = torch.where(which == number, value, alpha)
    return alpha
