"""The files or the commit of a model when a run began, so that it is resumed with the same model only."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import cached_file, extract_commit_hash

from .folder import read_run_record

_KINDS = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja")  # weights, config and tokenizer
_END = 1 << 20  # bytes at each end of a large file that are hashed


def model_files(name: str) -> dict[str, list[Any]]:
    """Name -> size and SHA-256 of each file of a checkpoint in a folder; {} for a model on the hub.

    Of files above two MiB, such as weights, the first and the last MiB are hashed.
    """
    folder = Path(name)
    if not folder.is_dir():
        return {}
    files = (file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix in _KINDS)
    return {file.name: [file.stat().st_size, _hash(file)] for file in files}


def require_same_model(record: Path, name: str, files: dict[str, list[Any]], option: str) -> None:
    """Raise ValueError if the model's folder had other `files` when the run in `record`, a JSON file, began.

    Args:
        record: of the run.
        name: of the model.
        files: that are there now.
        option: names another folder than that of `record`, for the message.
    """
    if not record.is_file():
        return
    before = read_run_record(record)["model_files"]
    changed = sorted(file for file in before.keys() | files.keys() if before.get(file) != files.get(file))
    if changed:
        raise ValueError(
            f"the model in {name} is not the one that {record.parent} was begun with: {', '.join(changed)} changed. "
            f"Put the model back, or use another {option}."
        )


def begun_with(record: Path) -> dict[str, Any]:
    """What a run recorded in a JSON file when it began; {} if there is no run."""
    return read_run_record(record) if record.is_file() else {}


def recorded_commit(begun: Mapping[str, Any], name: str, revision: str | None) -> str | None:
    """The commit on the hub that a run began with, None if that run had another model or revision.

    A branch may have moved since, and a resumed run keeps its weights.

    Args:
        begun: the record of the run, with `model`, `model_revision` and `model_commit`; {} if there is none.
        name: of the model.
        revision: of this run.
    """
    same = (begun.get("model"), begun.get("model_revision")) == (name, revision)
    commit: str | None = begun.get("model_commit") if same else None
    return commit


def commit_of(name: str, revision: str | None, *, cache_dir: str | None = None, subfolder: str = "") -> str | None:
    """The commit of a revision in the cache, which has its config already; None for a folder.

    Args:
        name: hub id or folder.
        revision: branch, tag or commit; None is "main".
        cache_dir: of `from_pretrained`.
        subfolder: of `from_pretrained`.
    """
    if Path(name).is_dir():
        return None
    where = {"revision": revision or "main", "cache_dir": cache_dir, "subfolder": subfolder}
    try:
        file = cached_file(name, "config.json", local_files_only=True, **where)
    except OSError:
        return None
    return extract_commit_hash(file, None)


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        size = file.stat().st_size
        if size <= 2 * _END:
            return hashlib.file_digest(content, "sha256").hexdigest()
        digest = hashlib.sha256(content.read(_END))
        content.seek(-_END, 2)  # from the end of the file
        digest.update(content.read())
    return digest.hexdigest()
