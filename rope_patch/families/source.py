"""What the code of a model's own functions says."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def function_tree(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The code of a function below its decorators, None where there is no source to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
