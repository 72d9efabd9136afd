"""The texts of the demo: the sources of Python's standard library."""

import json
from pathlib import Path

from rope_patch.checkpoints.full_disk import whole_file
from rope_patch.prompts.text import standard_library_files

_FILES = 200  # the longest ones, half of the text


def write_library(file: Path) -> None:
    """Write the longest sources as documents, {"text": ...} a line, unless `file` exists."""
    _write(file, standard_library_files()[:_FILES])


def write_held_out(file: Path) -> None:
    """Write as many of the next longest sources, which `write_library` leaves out, unless `file` exists."""
    _write(file, standard_library_files()[_FILES : 2 * _FILES])


def _write(file: Path, sources: list[Path]) -> None:
    if file.is_file():
        return
    texts = [source.read_text(encoding="utf-8", errors="replace") for source in sources]
    with whole_file(file) as beside:
        beside.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
