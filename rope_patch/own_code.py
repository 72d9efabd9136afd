"""Checkpoints that come with Python code of their own, which Transformers runs where a user says so alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPTION = "trust_remote_code"  # Transformers names it in its refusal, and in no other


@contextmanager
def own_code_refused(name: str | Path, argument: str = "") -> Iterator[None]:
    """Say what to do where Transformers, called with `trust_remote_code=False`, refuses a checkpoint for its code.

    Args:
        name: folder or hub id.
        argument: what the user gave it as; empty where that is plain.

    Raises:
        ValueError: it was refused.
    """
    try:
        yield
    except ValueError as error:
        if _OPTION not in str(error):
            raise
        raise ValueError(
            f"{argument}{': ' if argument else ''}{name} comes with Python code of its own (auto_map in its config), "
            "which runs where you say so alone. Read it; then train with `trust_remote_code: true` in a recipe of "
            "`rope-patch train`, or load the model with from_pretrained(..., trust_remote_code=True) and give that to "
            "patch_model or RopeSFTTrainer. Other commands take models that Transformers knows."
        ) from error
