"""Read JSON records and configs, with errors that name a damaged file. Imports nothing heavy."""

import json
from pathlib import Path
from typing import Any

_WORDS = {str: "a text", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}


def read_record(file: Path, remedy: str, shape: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        file: an existing file.
        remedy: a sentence for the error: what to do about a damaged file.
        shape: of entries; others pass. A type, with `| None` if the entry may be missing; or, for an entry that may
            be missing, the shape of an object, or a list with the shape of its items.

    Raises:
        ValueError: it is no JSON, no object or of another shape.
        OSError: it cannot be read.
    """
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}. {remedy}") from error
    problem = _misfit(values, shape or {}, "")
    if problem:
        raise ValueError(f"{file} {problem}. {remedy}")
    return values


def _misfit(value: Any, shape: Any, name: str) -> str:
    """What is wrong with a value, "" if nothing is."""
    kind: Any = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind):
        kinds = " or ".join(dict.fromkeys(_WORDS[each] for each in getattr(kind, "__args__", [kind]) if each in _WORDS))
        return f"must hold {kinds}{name and f' as {name}'}, got {value!r:.80}"
    inside = f"{name}." if name else ""
    entries: list[tuple[Any, Any, str]] = []
    if isinstance(shape, list):
        entries = [(item, shape[0], f"{name}[{i}]") for i, item in enumerate(value)]
    elif isinstance(shape, dict):
        asked = [key for key, of in shape.items() if key in value or not isinstance(of, dict | list)]
        entries = [(value.get(key), shape[key], inside + key) for key in asked]
    return next(filter(None, (_misfit(*entry) for entry in entries)), "")
