"""Views by name and options."""

from collections.abc import Mapping
from typing import Any

from ..base.registry import RESCALINGS, VIEWS, refuse_name_of, require_known, resolve
from .base import View
from .laws import with_laws


def find_view(name: str | View) -> type[View]:
    """The class of a view; raises ValueError for an unknown name."""
    refuse_name_of(RESCALINGS, VIEWS, name)
    if isinstance(name, View):
        return type(name)
    require_known("view", VIEWS, name)
    cls: type[View] = VIEWS[name]
    return cls


def resolve_view(view: str | View | Mapping[str, Any], options: dict[str, Any] | None = None) -> View:
    """The view of this name with these options, or of a recipe's `{view: NAME, OPTION: ...}`, or the instance itself.

    Raises:
        ValueError: unknown name or option, a required option that is missing, or a value out of its range.
    """
    if isinstance(view, Mapping) and "view" in view:
        return resolve_view(view["view"], {name: value for name, value in view.items() if name != "view"})
    refuse_name_of(RESCALINGS, VIEWS, view)
    resolved = resolve("view", VIEWS, (View,), view, with_laws(options or {}))
    assert isinstance(resolved, View)
    return resolved
