"""Check revisions of the hub before anything is loaded. Imports nothing heavy."""

from pathlib import Path


def require_revision(revision: str | None, name: str, argument: str) -> None:
    """Raise ValueError if `revision` is given for a folder.

    Args:
        revision: of a model on the hub, None for "main".
        name: hub id or folder of the model.
        argument: name of the user's argument, for messages.
    """
    if revision is not None and (not name or Path(name).is_dir()):
        is_folder = f"{name} is a folder" if name else "this one was loaded from nowhere"
        raise ValueError(
            f"{argument} {revision} is of a model on the hub, and {is_folder}: leave it out, or name the model by its "
            "hub id."
        )
