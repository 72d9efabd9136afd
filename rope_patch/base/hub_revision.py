"""Whether a revision can be one of a model on the hub, told before anything is loaded. Imports nothing heavy."""

from pathlib import Path


def require_revision(revision: str | None, name: str, argument: str) -> None:
    """Raise ValueError if `revision` is none of a model on the hub.

    Args:
        revision: as the user gave it, None for "main".
        name: hub id or folder of the model.
        argument: what the user gave it as, for messages.
    """
    if revision is not None and (not name or Path(name).is_dir()):
        is_folder = f"{name} is a folder" if name else "this one was loaded from nowhere"
        raise ValueError(
            f"{argument} {revision} is of a model on the hub, and {is_folder}: leave it out, or name the model by its "
            "hub id."
        )
