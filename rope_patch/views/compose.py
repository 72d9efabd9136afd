"""Several views, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..documents import Documents
from ..draws import DrawKey
from .base import VIEWS, Parameters, View
from .nope import NoPE
from .options import require_effect
from .rpe import RPE


@VIEWS.register("compose")
@dataclass(frozen=True)
class Compose(View):
    """r(t) = v_n(... v_2(v_1(t))), each view with its own draws.

    Example: `Compose([Skip(), PosAug()])` moves the suffix away and then scales all positions, the gap included.

    Args:
        views: the views in the order in which they act, at least one; in a recipe `{view: skip, max_skip: 4096}` stands
            for `Skip(max_skip=4096)` and `skip` for `Skip()`.
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
            require_effect(self, view.perturbs, f"{view!r} changes nothing: leave it out.")
        require_effect(
            self,
            len(self.views) == 1 or not any(isinstance(view, NoPE) for view in self.views),
            "view 'nope' leaves no distances that the others could change: give it alone.",
        )
        if any(isinstance(view, RPE) for view in self.views[1:]):
            raise ValueError("view 'compose': view 'rpe' goes by the index of a token, so it must come first.")

    @property
    def follows_progress(self) -> bool:
        return any(view.follows_progress for view in self.views)

    def check_length(self, length: int) -> None:
        for view in self.views:
            view.check_length(length)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return torch.stack([view.can_change(length) for view in self.views]).any(0)

    def reach(self, length: int, last: int | None = None) -> int | None:
        for view in self.views:
            last = view.reach(length, last)
            if last is None:
                return None
        return last

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {
            f"{i}.{name}": value
            for i, view in enumerate(self.views)
            for name, value in view.draw(length, key.substream(i)).items()
        }

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        return {
            f"{i}.{name}": value
            for i, view in enumerate(self.views)
            for name, value in view.draw_for(ids, t, documents, key.substream(i)).items()
        }

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        for i, view in enumerate(self.views):
            t = view.rope_index(t, parameters_of(parameters, i))
        return t


def parameters_of(parameters: Parameters, i: int) -> Parameters:
    """Those of the i-th view."""
    return {name.partition(".")[2]: v for name, v in parameters.items() if name.partition(".")[0] == str(i)}


def as_view(entry: object, owner: str) -> View:
    """The view itself, or the one that a name or a recipe's dictionary stands for."""
    from ..methods import resolve_view  # which imports the views

    if isinstance(entry, str):
        return resolve_view(entry)
    if isinstance(entry, dict) and "view" in entry:
        return resolve_view(entry["view"], {name: value for name, value in entry.items() if name != "view"})
    if not isinstance(entry, View):
        raise ValueError(
            f"view {owner!r} takes views such as Skip(max_skip=4096), in a recipe {{view: skip, max_skip: 4096}} or a "
            f"name, got {entry!r}."
        )
    return entry
