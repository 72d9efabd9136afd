"""From a method's name and options, as a user or a recipe gives them, to the object that does it."""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from .registry import unknown
from .rescalings import RESCALINGS, Rescaling
from .views import VIEWS, View

T = TypeVar("T")


def list_methods() -> list[str]:
    """Names that `patch_model` accepts: the rescalings, then the views."""
    return [*sorted(RESCALINGS), *sorted(VIEWS)]


def resolve_method(method: str | View | Rescaling, options: dict[str, Any] | None = None) -> View | Rescaling:
    """The view or rescaling that a name and its options, or an instance, stand for.

    Raises:
        ValueError: unknown name or option, a required option that is missing, or a value out of its range.
    """
    return _resolve("method", {**RESCALINGS, **VIEWS}, method, options)


def find_view(name: str | View) -> type[View]:
    """The class of a view.

    Raises:
        ValueError: no view has the name.
    """
    _require_not("view", VIEWS, "rescaling", RESCALINGS, name)
    if isinstance(name, View):
        return type(name)
    _require_known("view", VIEWS, name)
    return VIEWS[name]


def resolve_view(view: str | View, options: dict[str, Any] | None = None) -> View:
    """The same as `resolve_method` for views only."""
    _require_not("view", VIEWS, "rescaling", RESCALINGS, view)
    resolved = _resolve("view", VIEWS, view, options)
    assert isinstance(resolved, View)
    return resolved


def resolve_rescaling(rescaling: str | Rescaling, options: dict[str, Any] | None = None) -> Rescaling:
    """The same as `resolve_method` for rescalings only."""
    _require_not("rescaling", RESCALINGS, "view", VIEWS, rescaling)
    resolved = _resolve("rescaling", RESCALINGS, rescaling, options)
    assert isinstance(resolved, Rescaling)
    return resolved


def _require_not(kind: str, known: dict[str, type], other: str, others: dict[str, type], method: object) -> None:
    """Raise ValueError if `method` is the `other` kind, by name or as an instance."""
    name = method if isinstance(method, str) else getattr(method, "name", None)
    if name in others:
        raise ValueError(f"{name!r} is a {other}; a {kind} is one of {', '.join(sorted(known))}.")


def _require_known(kind: str, known: dict[str, Any], method: object) -> None:
    """Raise ValueError unless `method` is a name among `known`; what others call one of them leads to it."""
    if not isinstance(method, str) or method not in known:
        raise unknown(kind, method, known, synonyms={s: name for name, cls in known.items() for s in cls.synonyms})


def _resolve(kind: str, known: dict[str, type], method: object, options: dict[str, Any] | None) -> View | Rescaling:
    options = options or {}
    if isinstance(method, View | Rescaling):
        if options:
            raise ValueError(
                f"options {sorted(options)} go with a method's name; {method!r} has its arguments already."
            )
        return method
    _require_known(kind, known, method)
    assert isinstance(method, str)
    cls = known[method]
    return from_options(cls, f"{kind} {method!r}", options)


def from_options(cls: type[T], owner: str, options: dict[str, Any]) -> T:
    """The dataclass `cls` with `options` as its arguments; `owner` is what the errors say they belong to.

    Raises:
        ValueError: an option that is unknown or missing, or a value of a wrong type or out of its range.
    """
    allowed = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for option in options:
        if option not in allowed:
            raise unknown("option", option, allowed, of=owner)
    required = [n for n, f in allowed.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in options]
    if missing:
        raise ValueError(f"{owner} needs {' and '.join(missing)}, got {options}. Its options: {', '.join(allowed)}.")
    try:
        return cls(**options)
    except TypeError as error:  # a value that cannot be compared with numbers
        raise ValueError(f"{owner}: an option of {options} has a wrong type: {error}.") from error
