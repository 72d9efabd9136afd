"""The folder of a run, which may be stopped and resumed. Imports nothing heavy."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STEP = re.compile(r"^checkpoint-(\d+)$")


def require_same_settings(
    file: Path, settings: Mapping[str, Any], option: str, hashed: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError if an earlier run has other settings.

    Args:
        file: the record of the run.
        settings: of this run; the message names the entries that differ.
        option: the option that names another folder, for the message.
        hashed: name -> words for the message, of settings that are hashes.
    """
    if not file.is_file():
        return
    recorded = read_run_record(file)
    other: list[str] = []
    for name, here in settings.items():
        there = recorded.get(name)
        if there == here:
            continue
        if hashed is not None and name in hashed:
            other.append(f"{hashed[name]} changed")
        elif isinstance(there, Mapping) and isinstance(here, Mapping):
            entries = {**there, **here}
            differing = [key for key in entries if _shown(there, key) != _shown(here, key)]
            other += [_differing(f"{name}: {key}", there, here, key) for key in differing]
        else:
            other.append(_differing(name, recorded, settings, name))
    if other:
        raise ValueError(f"{file.parent} holds a run with other settings: {', '.join(other)}. Use another {option}.")


def read_run_record(file: Path) -> dict[str, Any]:
    """Read the record of a run, a JSON file that exists.

    Raises:
        ValueError: it is damaged.
    """
    from rope_patch.base.json_records import read_record  # imports torch

    return read_record(file, "Restore it from a copy, or begin anew in another folder.")


def _differing(name: str, there: Mapping[str, Any], here: Mapping[str, Any], key: str) -> str:
    return f"{name} {_shown(there, key)} there and {_shown(here, key)} here"


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, None if there is none.

    A training that is stopped while it saves leaves an incomplete one.
    """
    checkpoints = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _STEP.search(path.name))]
    return next((path for _, path in sorted(checkpoints, reverse=True) if is_whole(path)), None)


def is_whole(checkpoint: Path) -> bool:
    """Whether the trainer's state can be read, which Transformers writes last."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or incomplete
        return False
    return True


def write_whole(file: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as JSON; a process that is stopped while it writes leaves the old file."""
    beside = file.with_name(f"{file.name}.{os.getpid()}.new")  # in the same folder, for `os.replace` to be atomic
    try:
        beside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def only_run(path: Path, option: str) -> Iterator[None]:
    """Lock the folder of a run: two runs would write the same checkpoints, and remove each other's.

    Without locks in the system or the file system this does nothing. The lock ends with the process.

    Args:
        path: a file of the run that is never replaced, or its folder. Network file systems lock files
            only.
        option: the option that names another folder, for the message.

    Raises:
        ValueError: another process has locked it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    is_folder = path.is_dir()
    # a lock over a network needs a file that is open for writing, and must not empty it
    file = os.open(path, os.O_RDONLY if is_folder else os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(_in_use(path if is_folder else path.parent, option)) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(file)  # which unlocks it


def _in_use(folder: Path, option: str) -> str:
    return f"{folder} is in use: another process writes there. Wait for it, stop it, or use another {option}."
