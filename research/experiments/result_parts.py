"""Parts of a result that is not whole yet, so that a run which is cut off goes on where it was."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from result_lines import add_line, read_lines

T = TypeVar("T")


class Parts:
    """What a run has found so far, one JSON line a part.

    Args:
        file: of lines of all runs, or None to keep nothing.
        key: fields that the lines of this run have and no other run's.
    """

    def __init__(self, file: Path | None, key: Mapping[str, Any]) -> None:
        self.file, self.key = file, dict(key)
        lines = [] if file is None else [x for x in read_lines(file) if all(x.get(k) == v for k, v in key.items())]
        begins = max((k for k, line in enumerate(lines) if line["part"] is None), default=-1) + 1
        self.known: dict[str, Any] = {line["part"]: line["value"] for line in lines[begins:]}

    def begin(self) -> None:
        """Forget what there is, which is of a model that is no more."""
        self.known = {}
        self._add(None, None)

    def get(self, name: str, find: Callable[[], T]) -> T:
        """The part of that name, which `find` finds if it is not known."""
        if name not in self.known:
            self.known[name] = find()
            self._add(name, self.known[name])
        value: T = self.known[name]
        return value

    def remember(self, key: Mapping[str, Any], find: Callable[[], T]) -> T:
        """`get` for measures of `rope_patch.eval`, which name their parts by such keys."""
        return self.get(json.dumps(key), find)

    def _add(self, name: str | None, value: Any) -> None:
        if self.file is not None:
            add_line(self.file, {**self.key, "part": name, "value": value})
