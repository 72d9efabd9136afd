"""Make a view or a rescaling from its name and options."""

from typing import Any

from .base.registry import refuse_name_of, resolve
from .rescalings import RESCALINGS, Rescaling
from .views import VIEWS, View
from .views.by_name import find_view, resolve_view
from .views.laws import with_laws

__all__ = ["find_view", "list_methods", "resolve_method", "resolve_rescaling", "resolve_view"]


def list_methods() -> list[str]:
    """Names that `patch_model` accepts: the rescalings, then the views."""
    return [*RESCALINGS.names(), *VIEWS.names()]


def resolve_method(method: str | View | Rescaling, options: dict[str, Any] | None = None) -> View | Rescaling:
    """Make the view or rescaling of this name with these options; an instance is returned as it is.

    Raises:
        ValueError: unknown name or option, a required option that is missing, or a value out of its range.
    """
    both = {**dict.fromkeys(list_methods()), **RESCALINGS, **VIEWS}
    known = next((names for names in (RESCALINGS, VIEWS) if isinstance(method, str) and method in names), both)
    resolved = resolve("method", known, (View, Rescaling), method, with_laws(options or {}))
    assert isinstance(resolved, View | Rescaling)
    return resolved


def resolve_rescaling(rescaling: str | Rescaling, options: dict[str, Any] | None = None) -> Rescaling:
    """Make the rescaling of this name with these options; errors are those of `resolve_method`."""
    refuse_name_of(VIEWS, RESCALINGS, rescaling)
    resolved = resolve("rescaling", RESCALINGS, (Rescaling,), rescaling, options)
    assert isinstance(resolved, Rescaling)
    return resolved
