"""What a trainer wrote beside a checkpoint about the run that it is of, and about the runs before."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORD_NAME = "rope_patch_training.json"


def read_runs(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The training runs that made the checkpoint in `folder`, the last one at the end; [] where none is recorded.

    A run is what the trainer trained with (`objective`, `view`, `view_args` and options of the objective) and, under
    "run", what on and how long. An earlier version recorded no such "run". "" is no folder: that of a model which was
    loaded from nowhere.
    """
    file = Path(folder) / RECORD_NAME
    if not str(folder) or not file.is_file():
        return []
    record = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        return []
    earlier = record.pop("earlier", [])
    return [*earlier, record]


def write_runs(runs: Sequence[Mapping[str, Any]], folder: str | os.PathLike[str]) -> None:
    """Record `runs` in `folder`, as `read_runs` gives them; nothing where there are none."""
    if not runs:
        return
    earlier = {"earlier": list(runs[:-1])} if runs[1:] else {}
    file = Path(folder) / RECORD_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**runs[-1], **earlier}, indent=2) + "\n", encoding="utf-8")
