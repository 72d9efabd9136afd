"""Views, rescalings, objectives and measures by name, those of other installed packages too."""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from typing import Any, TypeVar

from transformers.utils import logging

from .not_here import NOT_HERE

logger = logging.get_logger(__name__)

T = TypeVar("T")
_MOST_LISTED = 40  # names in an error; the fields of a trainer's config would fill a page


class Registry(dict[str, Any]):
    """Name -> class, or object: a dict that refuses a name twice and suggests the nearest name for an unknown one.

    An installed package declares a name as an entry point of the group `rope_patch.views`, `.rescalings`, `.objectives`
    or `.measures`. Its module registers the name, and is imported when the name is first looked up.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.group = f"rope_patch.{kind}s"

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorator that adds a class under `name` and sets its attribute `name`."""

        def add(cls: type[T]) -> type[T]:
            self.add(name, cls)
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def add(self, name: str, value: object) -> None:
        """Add a class or an object; ValueError if there is one of this name."""
        if super().__contains__(name):
            raise ValueError(
                f"{self.kind} {name!r} is already registered, as {getattr(self[name], '__qualname__', self[name])}."
            )
        self[name] = value

    def names(self) -> list[str]:
        """All names, sorted, without importing those of other packages."""
        return sorted({*self, *entry_points(group=self.group).names})

    def load_all(self) -> None:
        """Import what other packages declare; one that fails gives a warning, so that the others can be listed."""
        for name in entry_points(group=self.group).names:
            try:
                self._load(name)
            except ValueError as error:
                logger.warning(str(error))

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name) and isinstance(name, str):
            self._load(name)
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise unknown_method(self.kind, name, self)

    def _load(self, name: str) -> None:
        """Import the entry points of this name.

        Raises:
            ValueError: the import fails, or registers no such name.
        """
        for entry in entry_points(group=self.group, name=name):
            try:
                entry.load()
            except Exception as error:  # an import can raise anything
                raise ValueError(f"{self.kind} {name!r} of {entry.value} cannot be loaded: {error}") from error
            if not super().__contains__(name):
                raise ValueError(f"{entry.value} of entry point {name!r} registers no {self.kind} of that name.")


# here, so that a view that is made of others can look up both without importing rescalings
VIEWS = Registry("view")
RESCALINGS = Registry("rescaling")


def unknown(kind: str, name: object, known: Collection[str], of: str = "", *, answer: str = "") -> ValueError:
    """The error for a `name` that is not in `known`.

    Args:
        kind: what has such names.
        name: what the user gave.
        known: the names that exist.
        of: what has the names, for the message.
        answer: what the user may have meant; "" asks for the nearest names in `known`.
    """
    of = of and f" of {of}"
    listed = len(known) <= _MOST_LISTED
    if not answer and isinstance(name, str):
        answer = _did_you_mean(*difflib.get_close_matches(name.lower(), known, n=1 if listed else 3))
    rest = f"Known: {', '.join(sorted(known)) or 'none'}." if listed else ""
    return ValueError(" ".join(part for part in (f"Unknown {kind} {name!r}{of}.", answer, rest) if part))


def _did_you_mean(*names: str) -> str:
    return f"Did you mean {' or '.join(map(repr, names))}?" if names else ""


def unknown_method(kind: str, name: object, known: Mapping[str, Any]) -> ValueError:
    """The error for the name of a method that is not in `known`, whose values have `synonyms`.

    It answers names that others use: with ours, or with what comes nearest to a method that is not here.
    """
    typed = _bare(name) if isinstance(name, str) else ""
    names = known.names() if isinstance(known, Registry) else known
    same = [ours for ours, method in known.items() if typed in map(_bare, (ours, *getattr(method, "synonyms", ())))]
    nearest = next((answer for names, answer in NOT_HERE.items() if typed in map(_bare, names.split())), "")
    return unknown(kind, name, names, answer=_did_you_mean(*same) or nearest)


def _bare(name: str) -> str:
    """A name without what is written in several ways: case, hyphens, spaces."""
    return re.sub(r"[\W_]", "", name.lower())


def refuse_name_of(others: Registry, known: Registry, method: object) -> None:
    """Raise ValueError if `method`, a name or an instance, is in `others` instead of `known`."""
    name = method if isinstance(method, str) else getattr(method, "name", None)
    if name not in known and name in others:
        raise ValueError(f"{name!r} is a {others.kind}; a {known.kind} is one of {', '.join(known.names())}.")


def require_known(kind: str, known: Mapping[str, Any], method: object) -> None:
    """Raise ValueError, with the nearest name, unless `method` is a name in `known`."""
    if not isinstance(method, str) or method not in known:
        raise unknown_method(kind, method, known)


def resolve(
    kind: str, known: Mapping[str, type], bases: tuple[type, ...], method: object, options: dict[str, Any] | None
) -> object:
    """The object of a name in `known` with these options, or `method` itself if it is one of `bases`.

    Raises:
        ValueError: unknown name or option, a required option that is missing, a value out of its range, or options
            beside an instance.
    """
    options = options or {}
    if isinstance(method, bases):
        if options:
            raise ValueError(f"options {sorted(options)} go with a method's name; {method!r} already has arguments.")
        return method
    require_known(kind, known, method)
    assert isinstance(method, str)
    return from_options(known[method], f"{kind} {method!r}", options)


def from_options(cls: type[T], owner: str, options: dict[str, Any]) -> T:
    """The dataclass `cls` with `options` as arguments; `owner` is its name in errors.

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
