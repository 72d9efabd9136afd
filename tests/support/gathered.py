"""What lies beside the tests of each view or rescaling, and other tests go through too."""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def gathered(registry: Mapping[str, type], name: str) -> dict[str, Any]:
    """The dicts of this name in the test files of all registered classes, as one.

    The test file of a class of `rope_patch/views/skip.py` is `tests/rope_patch/views/test_skip.py`.
    """
    together: dict[str, Any] = {}
    for module in dict.fromkeys(cls.__module__ for cls in registry.values()):
        *folders, stem = module.split(".")
        file = TESTS.joinpath(*folders, f"test_{stem}.py")
        if file.exists():
            together |= runpy.run_path(str(file)).get(name, {})
    return together
