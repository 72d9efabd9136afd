"""Names of views and rescalings, with errors that help."""

import difflib
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Registry(dict[str, type]):
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


def unknown(kind: str, name: object, known: "dict[str, type]") -> ValueError:
    """The error for a `name` that is not among `known`, with the nearest one as a suggestion."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(sorted(known))}.")
