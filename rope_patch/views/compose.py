"""Several views, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .base import VIEWS, Parameters, View
from .nope import NoPE
from .rpe import RPE
from .several import Several, parameters_of


@VIEWS.register("compose")
@dataclass(frozen=True)
class Compose(Several):
    """r(t) = v_n(... v_2(v_1(t))), each view with its own draws.

    Example: `Compose([Skip(), PosAug()])` moves the suffix away and then scales all positions, the gap included.

    Args:
        views: the views in the order in which they act, at least one; in a recipe `{view: skip, split: 512}` stands for
            `Skip(split=512)` and `skip` for `Skip()`.

    When: Take it to combine views, such as a skip and a scaling of all positions.

    Source: ours.
    """

    views: Sequence[View]

    def __post_init__(self) -> None:
        self._take_views(least=1)
        if len(self.views) > 1 and any(isinstance(view, NoPE) for view in self.views):
            raise ValueError(
                "view 'compose': view 'nope' leaves no distances that other views could change: use it alone."
            )
        if any(isinstance(view, RPE) for view in self.views[1:]):
            raise ValueError("view 'compose': view 'rpe' takes the index of a token, so it must come first.")

    def conditions(self) -> list[str]:
        return [*super().conditions(), "the views of a composition must not undo each other"]

    def check_length(self, length: int) -> None:
        super().check_length(length)
        View.check_length(self, length)  # each view alone may reach less

    def reach(self, length: int, last: int | None = None) -> int | None:
        for view in self.views:
            last = view.reach(length, last)
            if last is None:
                return None
        return last

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        for i, view in enumerate(self.views):
            t = view.rope_index(t, parameters_of(parameters, i))
        return t
