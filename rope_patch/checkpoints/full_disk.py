"""Files and folders that are written whole, and a disk that is full meanwhile: no library says which one it was."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
# of safetensors, and of torch, whose writer does not say why it cannot go on
_WORDS = ("No space left on device", "quota exceeded", "PytorchStreamWriter", "unexpected pos", "basic_ios::clear")


class FullDisk(OSError):
    """A file or folder could not be written. Its message is whole, and blocks around leave it as it is."""


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A new file beside `file` to write in the block: it takes that name at the end, or is removed if the block fails.

    Several threads or processes may write one `file`: each has its own beside it, and the last one stays.

    Raises:
        FullDisk: it cannot be written.
    """
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with disk_full_errors(file):
            yield beside
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def disk_full_errors(
    folder: Path, what_to_do: Callable[[], str] = lambda: "Free some space, and run the same again."
) -> Iterator[None]:
    """Say of what cannot be written in the block where it belongs, how much is free there, and what to do.

    Args:
        folder: or file that is written; it need not be there yet.
        what_to_do: sentences, asked for once it cannot be written.

    Raises:
        FullDisk: the disk or a quota is full, or torch cannot write. All else is raised as it is.
    """
    try:
        yield
    except FullDisk:
        raise
    except BaseException as error:  # which torch.distributed.checkpoint raises
        reason = _reason(error)
        if reason is None:
            raise
        there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
        free = shutil.disk_usage(there).free / 1e9
        raise FullDisk(
            f"{folder} could not be written, on a disk with {free:.1f} GB free: {reason}. {what_to_do()}"
        ) from error


def _reason(error: BaseException | None) -> str | None:
    """What the first says that is of a full disk, of errors that led to one another; it may stand in a traceback."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NUMBERS:
            return str(error)
        for line in str(error).splitlines():
            if any(words in line for words in _WORDS):
                return line.strip()
        error = error.__cause__ or error.__context__
    return None
