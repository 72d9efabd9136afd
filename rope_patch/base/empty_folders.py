"""Remove folders of failed commands. Imports nothing heavy."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """If the block raises, remove `folder` and its parents, as far as the block made them and they are empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # stops at the first folder with files
            for path in made:
                path.rmdir()
        raise
