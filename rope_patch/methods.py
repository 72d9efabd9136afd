"""From a method's name and options, as a user or a recipe gives them, to the object that does it."""

from dataclasses import fields
from typing import Any

from .registry import unknown
from .rescalings import RESCALINGS, Rescaling
from .views import VIEWS, View


def list_methods() -> list[str]:
    """Names that `patch_model` accepts: the rescalings, then the views."""
    return [*sorted(RESCALINGS), *sorted(VIEWS)]


def resolve_method(method: str | View | Rescaling, options: dict[str, Any] | None = None) -> View | Rescaling:
    """The view or rescaling that a name and its options, or an instance, stand for.

    Raises:
        ValueError: unknown name or option, a required option that is missing, or a value out of its range.
    """
    options = options or {}
    if isinstance(method, View | Rescaling):
        if options:
            raise ValueError(
                f"options {sorted(options)} go with a method's name; {method!r} has its arguments already."
            )
        return method
    known: dict[str, type] = {**RESCALINGS, **VIEWS}
    if not isinstance(method, str) or method not in known:
        raise unknown("method", method, known)
    cls = known[method]
    allowed = [f.name for f in fields(cls)]
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {method!r}", option, dict.fromkeys(allowed, cls))
    try:
        return cls(**options)
    except TypeError as error:  # a required option is missing
        raise ValueError(f"{method!r}: {error}. Its options: {', '.join(allowed)}.") from error


def resolve_view(view: str | View, options: dict[str, Any] | None = None) -> View:
    """The same for views only."""
    found = resolve_method(view, options)
    if not isinstance(found, View):
        raise ValueError(f"{found.name!r} is a rescaling; a view is one of {', '.join(sorted(VIEWS))}.")
    return found


def resolve_rescaling(rescaling: str | Rescaling, options: dict[str, Any] | None = None) -> Rescaling:
    """The same for rescalings only."""
    found = resolve_method(rescaling, options)
    if not isinstance(found, Rescaling):
        raise ValueError(f"{found.name!r} is a view; a rescaling is one of {', '.join(sorted(RESCALINGS))}.")
    return found
