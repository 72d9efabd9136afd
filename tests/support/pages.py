"""Pages of the documentation and the files of results that they quote."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "results"
MADE = {ROOT / "docs" / name for name in ("_build", "methods", "tutorials", "command_line.md")}
"""What `make docs` writes."""


def is_made(file):
    """Whether `make docs` writes the file."""
    return not MADE.isdisjoint({file, *file.parents})


def text_of(page):
    """The page without bold marks and on one line, so that a sentence is found wherever it is broken."""
    return " ".join((ROOT / page).read_text().replace("**", "").split())


def lines_of(*files):
    return [json.loads(line) for file in files for line in (RESULTS / file).read_text().splitlines()]


def share(value, digits=2):
    return f"{value:.{digits}f}".removeprefix("0") if value else "0"
