"""A folder that belongs to one run, which may be stopped and go on. Imports nothing heavy."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def require_same_settings(file: Path, settings: Mapping[str, Any], option: str) -> None:
    """Raise ValueError if an earlier run, recorded in `file`, has other settings; `option` names another folder."""
    if not file.is_file():
        return
    recorded = json.loads(file.read_text(encoding="utf-8"))
    other = [
        f"{name} {recorded.get(name)!r} there and {here!r} here"
        for name, here in settings.items()
        if recorded.get(name) != here
    ]
    if other:
        raise ValueError(f"{file.parent} holds a run with other settings: {', '.join(other)}. Use another {option}.")


def record_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder of `file` the run's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@contextmanager
def only_run(path: Path, option: str) -> Iterator[None]:
    """Hold the folder of a run: two of them would write the same checkpoints, and remove each other's.

    Where the system or the file system has no locks, nothing is held. The end of the process lets go, however it ends.

    Args:
        path: the file of `record_settings`, or the folder itself where there is none. Network file systems lock files
            alone.
        option: names another folder, for the message.

    Raises:
        ValueError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    is_folder = path.is_dir()
    held = os.open(path, os.O_RDONLY if is_folder else os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{path if is_folder else path.parent} is in use: another process writes there. Wait for it, stop it, "
                f"or use another {option}."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(held)


class Stopwatch:
    """Seconds per step, kept in a file so that a run that was stopped still knows those of its earlier parts.

    Args:
        file: that keeps them.
        writes: whether this process writes it: of several ranks, one.
    """

    def __init__(self, file: Path, *, writes: bool = True) -> None:
        self.file, self.writes = file, writes
        self.times: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def __call__(self, step: str) -> "Stopwatch":
        self.step = step
        return self

    def __enter__(self) -> None:
        self.begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.times[self.step] = self.times.get(self.step, 0.0) + time.perf_counter() - self.begin
        if self.writes:
            self.file.write_text(json.dumps(self.times, indent=2) + "\n", encoding="utf-8")
