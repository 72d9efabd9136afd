"""Expand `~` where no shell has: after `--FLAG=`, within quotation marks, and in recipes."""

import os
import re
from typing import Any


def with_home(value: Any) -> Any:
    """Expand `~/...` in an argument of the command line, or in all values of a recipe."""
    if isinstance(value, str):
        return re.sub(r"^(--[\w-]+=)?~(?=/)", lambda found: (found[1] or "") + os.path.expanduser("~"), value)
    if isinstance(value, list):
        return [with_home(item) for item in value]
    return {name: with_home(item) for name, item in value.items()} if isinstance(value, dict) else value
