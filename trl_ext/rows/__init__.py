"""Training rows that keep what a model can do: text, its own chats, and questions about hidden facts.

`make_rows` is the entry point, `extend` and `rope-patch rows` call it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mix import make_rows, mixed_rows, text_rows_for_training
    from .questions import question_rows
    from .row import Row
    from .sampling import own_chats, own_texts

__all__ = ["Row", "make_rows", "mixed_rows", "own_chats", "own_texts", "question_rows", "text_rows_for_training"]

_HOMES = {
    "Row": "row",
    "make_rows": "mix",
    "mixed_rows": "mix",
    "own_chats": "sampling",
    "own_texts": "sampling",
    "question_rows": "questions",
    "text_rows_for_training": "mix",
}


def __getattr__(name: str) -> Any:
    """Import torch only when rows are made: `rope-patch --help` should not wait for it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
