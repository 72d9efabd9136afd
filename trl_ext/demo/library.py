"""The texts of the demo: the sources of Python's standard library."""

import json
from pathlib import Path

from rope_patch.checkpoints.full_disk import whole_file
from rope_patch.prompts.text import standard_library_files

_FILES = 200  # the longest ones, half of the text


def write_library(file: Path) -> None:
    """Write the longest sources as documents, {"text": ...} a line, unless `file` exists."""
    if file.is_file():
        return
    texts = [source.read_text(encoding="utf-8", errors="replace") for source in standard_library_files()[:_FILES]]
    with whole_file(file) as beside:
        beside.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
