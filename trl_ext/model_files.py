"""The files or the commit of a model when a run began, so that it goes on with the same model, or not at all."""

import hashlib
import json
from pathlib import Path
from typing import Any

_KINDS = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja")  # weights, config and tokenizer
_END = 1 << 20  # bytes of either end of a large file that are looked at


def model_files(name: str) -> dict[str, list[Any]]:
    """Name -> size and SHA-256 of each file of a checkpoint in a folder; nothing of a model on the hub.

    Of files above two MiB, which weights are, the first and the last MiB are hashed.
    """
    folder = Path(name)
    if not folder.is_dir():
        return {}
    files = (file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix in _KINDS)
    return {file.name: [file.stat().st_size, _hash(file)] for file in files}


def require_same_model(record: Path, name: str, files: dict[str, list[Any]], option: str) -> None:
    """Raise ValueError if the run in `record`, a JSON file, was begun with other `files` in the model's folder.

    Args:
        record: of the run.
        name: of the model.
        files: that are there now.
        option: names another folder than that of `record`, for the message.
    """
    before = recorded_files(record)
    if before is None:
        return
    changed = sorted(file for file in before.keys() | files.keys() if before.get(file) != files.get(file))
    if changed:
        raise ValueError(
            f"the model in {name} is another than the one that {record.parent} was begun with: {', '.join(changed)} "
            f"changed. Put the model back, or use another {option}."
        )


def recorded_files(record: Path) -> dict[str, list[Any]] | None:
    """The files that a run was begun with; None where there is no run, or one of an older version, which kept none."""
    return json.loads(record.read_text(encoding="utf-8")).get("model_files") if record.is_file() else None


def recorded_commit(record: Path, name: str, revision: str | None) -> str | None:
    """The commit on the hub that a run of this model and revision was begun with; None where there is no such run.

    Its branch may have moved since, and a run that goes on goes on with the same weights.
    """
    if not record.is_file():
        return None
    begun = json.loads(record.read_text(encoding="utf-8"))
    same = (begun.get("model"), begun.get("model_revision")) == (name, revision)
    commit: str | None = begun.get("model_commit") if same else None
    return commit


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        size = file.stat().st_size
        if size <= 2 * _END:
            return hashlib.file_digest(content, "sha256").hexdigest()
        digest = hashlib.sha256(content.read(_END))
        content.seek(-_END, 2)
        digest.update(content.read())
    return digest.hexdigest()
