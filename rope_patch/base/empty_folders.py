"""Folders that are made before it is known whether anything is written there. Imports nothing heavy."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """Remove `folder`, and those around it, which were made inside, where that fails and nothing is in them."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first that was not made, or that holds something
            for path in made:
                path.rmdir()
        raise
