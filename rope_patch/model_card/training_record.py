"""The training record that a trainer writes beside a checkpoint: its run, and the runs before."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.json_records import read_record
from ..checkpoints.files_beside import require_no_way_out

RECORD_NAME = "rope_patch_training.json"
_RUN = {
    "objective": str | None,
    "objective_args": {},
    "view": str | None,
    "view_args": {},
    "run": {
        "base_model": {"name": str, "is_on_hub": bool, "license": str | None, "revision": str | None},
        "hub_model": {"model": str, "model_revision": str | None, "model_commit": str},
        "native_window": int | float | None,
        "rescalings": [{"method": str, "options": dict}],
        "trained": str | None,
        "dataset": str | None,
        "documents": int | None,
        "rows": int | None,
        "row_hashes": {},
        "row_length": int | None,
        "tokens": int | None,
        "steps": int | None,
        "learning_rate": str | None,
        "papers": [str],
        "versions": {},
    },
}
_RECORD = {**_RUN, "earlier": [_RUN]}


def read_runs(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The training runs that made the checkpoint in `folder`, in order; [] if none is recorded.

    A run has the options of the trainer (`objective`, `objective_args`, `view`, `view_args` and more) and, under "run",
    facts such as base model, data and steps. `folder` is "" for a model that was not loaded from a folder.

    Raises:
        ValueError: the record is damaged, or is a link out of the folder.
    """
    file = Path(folder) / RECORD_NAME
    if not str(folder) or not file.is_file():
        return []
    require_no_way_out(file, file.parent)
    record = read_record(file, "Delete it, or copy it again from where the model was saved.", _RECORD)
    earlier = record.pop("earlier", None) or []
    return [*earlier, record]


def write_runs(runs: Sequence[Mapping[str, Any]], folder: str | os.PathLike[str]) -> None:
    """Record `runs` in `folder`, for `read_runs`; without runs, write nothing."""
    if not runs:
        return
    earlier = {"earlier": list(runs[:-1])} if runs[1:] else {}
    file = Path(folder) / RECORD_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**runs[-1], **earlier}, indent=2) + "\n", encoding="utf-8")
