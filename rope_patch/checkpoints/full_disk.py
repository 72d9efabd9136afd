"""Writing files whole or not at all, and explaining errors of a full disk, which libraries raise without the file."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
# messages of safetensors, and of torch, whose writer gives no reason
_WORDS = ("No space left on device", "quota exceeded", "PytorchStreamWriter", "unexpected pos", "basic_ios::clear")


class FullDisk(OSError):
    """A file or folder could not be written; outer `disk_full_errors` blocks do not change the message."""


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A temporary file to write in the block, which becomes `file` at the end, or is removed if the block raises.

    Several threads or processes may write the same `file`; the last one stays.

    Raises:
        FullDisk: it cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with disk_full_errors(file):
            yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def disk_full_errors(
    folder: Path, what_to_do: Callable[[], str] = lambda: "Free some space, and run the same again."
) -> Iterator[None]:
    """Turn errors of a full disk in the block into one that names the folder, its free space, and what to do.

    Args:
        folder: the folder or file that is written; it need not exist yet.
        what_to_do: returns the advice of the error; called only for an error.

    Raises:
        FullDisk: the disk or a quota is full, or torch cannot write. Other errors are raised unchanged.
    """
    try:
        yield
    except FullDisk:
        raise
    except BaseException as error:  # torch.distributed.checkpoint raises a BaseException
        reason = _reason(error)
        if reason is None:
            raise
        there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
        free = shutil.disk_usage(there).free / 1e9
        raise FullDisk(
            f"{folder} could not be written, on a disk with {free:.1f} GB free: {reason}. {what_to_do()}"
        ) from error


def _reason(error: BaseException | None) -> str | None:
    """The message of the first full-disk error in a chain of causes, or in a traceback within a message."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NUMBERS:
            return str(error)
        for line in str(error).splitlines():
            if any(words in line for words in _WORDS):
                return line.strip()
        error = error.__cause__ or error.__context__
    return None
