"""Names of views, rescalings and objectives, with errors that help."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
_MOST_LISTED = 30  # names in an error: fields of a trainer's config would fill a page


class Registry(dict[str, Any]):
    """Name -> class for one kind of thing: a dict with two helpful errors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorator that adds a class under `name` and stores the name on it as `name`."""

        def add(cls: type[T]) -> type[T]:
            if name in self:
                raise ValueError(f"{self.kind} {name!r} is already registered, as {self[name].__qualname__}.")
            self[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def __missing__(self, name: str) -> NoReturn:
        raise unknown(self.kind, name, self)


def unknown(
    kind: str, name: object, known: Collection[str], of: str = "", *, synonyms: Mapping[str, str] | None = None
) -> ValueError:
    """The error for a `name` that is not among `known`, which are those `of` something, with the nearest one.

    Where there are too many to list, with the nearest three. `synonyms` are names that others use, in lower case with
    hyphens, each with the one in `known` that means the same: those that no spelling would lead to.
    """
    of = of and f" of {of}"
    listed = len(known) <= _MOST_LISTED
    near: list[str]
    if isinstance(name, type):
        shown, near = f"{name.__name__}, a class: give an instance of it, or a name", []
    elif isinstance(name, str):
        meant = (synonyms or {}).get(name.lower().replace("_", "-").replace(" ", "-"))
        near = (
            [meant]
            if meant is not None and meant in known
            else difflib.get_close_matches(name.lower(), known, n=1 if listed else 3)
        )
        shown = repr(name)
    else:  # a model in place of a name would be shown over many lines
        text = repr(name)
        shown, near = (text if "\n" not in text else f"of type {type(name).__name__}"), []
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    rest = f" Known: {', '.join(sorted(known)) or 'none'}." if listed else ""
    return ValueError(f"Unknown {kind} {shown}{of}.{hint}{rest}")
