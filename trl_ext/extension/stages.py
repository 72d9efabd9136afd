"""Stages of a run: each writes its figures into the folder, and is skipped when the run is resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rope_patch.base.json_records import read_record
from rope_patch.checkpoints.full_disk import whole_file


class Stages:
    """The finished stages, a JSON file each.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str) -> Path:
        """The file with the figures of a stage."""
        return self.folder / "stages" / f"{name}.json"

    def is_done(self, name: str) -> bool:
        """Whether an earlier run, or this one, has finished the stage."""
        return self.file(name).is_file()

    def forget(self, name: str) -> None:
        """Make a stage run again."""
        self.file(name).unlink(missing_ok=True)

    def run(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures of a stage, from its file or else from `make()`, whose return is written to it."""
        file = self.file(name)
        if not file.is_file():
            figures = make()
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as beside:
                beside.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        return read_record(file, "Remove it, and run the same command again.")
