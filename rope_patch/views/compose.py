"""Several views, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .base import VIEWS, Parameters, View
from .nope import NoPE
from .rpe import RPE
from .several import Several, as_view, parameters_of


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
        if isinstance(self.views, str | View) or not isinstance(self.views, Sequence) or not self.views:
            raise ValueError(f"view 'compose': views must be a list of at least one view, got {self.views!r}.")
        # a tuple is hashable, and safe from later changes by the caller
        object.__setattr__(self, "views", tuple(as_view(entry, "compose") for entry in self.views))
        if any(view.stands_alone for view in self.views):
            raise ValueError(
                "view 'compose': a view that differs by layer or rescales frequencies stands alone, and so does 'mix', "
                "whose views may be compositions."
            )
        for view in self.views:
            if not view.perturbs:
                raise ValueError(f"view 'compose': {view!r} changes nothing: leave it out.")
            if isinstance(view, NoPE) and len(self.views) > 1:
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
