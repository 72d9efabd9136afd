"""Arguments in one form: flags with hyphens, and `~` expanded where no shell does it. Imports nothing heavy."""

import os
import re
from collections.abc import Sequence
from typing import Any


def normalized(arguments: Sequence[str]) -> list[str]:
    """`--output_dir` as `--output-dir`, and `~/x`, also after `--FLAG=`, in the user's home."""
    made = []
    for argument in arguments:
        flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        made.append(flag.replace("_", "-") + equals + with_home(value))
    return made


def is_hub_id(name: str) -> bool:
    """Whether a name that is no file or folder may be one on the hub, OWNER/NAME, and not a path with a mistake."""
    owner, slash, last = name.partition("/")
    looks_so = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not re.search(r"\.(\w*json\w*|txt|md|gz|xz)$", last)
    return bool(looks_so) and not os.path.exists(name) and not os.path.isdir(owner)


def with_home(value: Any) -> Any:
    """Expand `~/...` in a text, or in all values of a recipe."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, list):
        return [with_home(item) for item in value]
    return {name: with_home(item) for name, item in value.items()} if isinstance(value, dict) else value
