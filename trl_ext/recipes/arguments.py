"""Arguments in one form: flags with hyphens, and `~` expanded where no shell does it. Imports nothing heavy."""

import os
from collections.abc import Sequence
from typing import Any


def normalized(arguments: Sequence[str]) -> list[str]:
    """`--output_dir` as `--output-dir`, and `~/x`, also after `--FLAG=`, in the user's home."""
    made = []
    for argument in arguments:
        flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        made.append(flag.replace("_", "-") + equals + with_home(value))
    return made


def with_home(value: Any) -> Any:
    """Expand `~/...` in a text, or in all values of a recipe."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, list):
        return [with_home(item) for item in value]
    return {name: with_home(item) for name, item in value.items()} if isinstance(value, dict) else value
