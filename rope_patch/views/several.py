"""Base of views that are made of several views."""

from collections.abc import Sequence
from typing import Any

import torch

from ..base.draws import DrawKey
from ..layout.documents import Documents
from .base import Parameters, View
from .by_name import resolve_view


class Several(View):
    """Base of views that hold `views`. Each of them draws from a separate stream; its parameters are named `i.NAME`."""

    views: Sequence[View]

    def _take_views(self, least: int) -> None:
        """Check `views` and make them a tuple, which is hashable and safe from later changes by the caller."""
        if isinstance(self.views, str | View) or not isinstance(self.views, Sequence) or len(self.views) < least:
            raise ValueError(
                f"view {self.name!r}: views must be a list of views, at least {least}, got {self.views!r}."
            )
        object.__setattr__(self, "views", tuple(as_part(entry, self.name) for entry in self.views))

    @property
    def follows_progress(self) -> bool:
        return any(view.follows_progress for view in self.views)

    @property
    def draws_by_forward(self) -> bool:
        return any(view.draws_by_forward for view in self.views)

    @property
    def reads_tokens(self) -> bool:
        return any(view.reads_tokens for view in self.views)

    def cited(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.cites, *(paper for view in self.views for paper in view.cited()))))

    def check_run(self, args: Any) -> None:
        for view in self.views:
            view.check_run(args)

    def check_length(self, length: int) -> None:
        for view in self.views:
            view.check_length(length)

    def conditions(self) -> list[str]:
        return list(dict.fromkeys(clause for view in self.views for clause in view.conditions()))

    def targets(self) -> list[tuple[str, int]]:
        return [target for view in self.views for target in view.targets()]

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return torch.stack([view.can_change(length) for view in self.views]).any(0)

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


def parameters_of(parameters: Parameters, i: int) -> Parameters:
    """The parameters of the i-th view."""
    return {name.partition(".")[2]: v for name, v in parameters.items() if name.partition(".")[0] == str(i)}


def as_part(entry: object, owner: str) -> View:
    """A view that can be part of view `owner`, from a view, a name or a recipe's dictionary."""
    if isinstance(entry, str) or (isinstance(entry, dict) and "view" in entry):
        entry = resolve_view(entry)
    if not isinstance(entry, View):
        raise ValueError(
            f"view {owner!r} takes views such as Skip(split=512), in a recipe {{view: skip, split: 512}} or a name, "
            f"got {entry!r}."
        )
    if entry.stands_alone:
        raise ValueError(
            f"view {owner!r}: a view that differs by layer, rescales frequencies, scales queries or mixes views "
            f"cannot be part of another view, got {entry!r}."
        )
    return entry
