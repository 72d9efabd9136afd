"""Rows as JSON lines. Imports nothing heavy."""

import json
import lzma
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .row import KINDS, Row

ENDINGS = (".jsonl", ".jsonl.xz")


def require_row_file(path: Path) -> None:
    """Raise ValueError unless rows can be written to `path`, a new file in an existing folder."""
    if not path.name.endswith(ENDINGS):
        raise ValueError(f"--output must end with {' or '.join(ENDINGS)}, got {path}.")
    if path.exists():
        raise ValueError(f"--output {path} is there already: remove it, or name another file.")
    if not os.access(path.parent, os.W_OK) or not path.parent.is_dir():  # before minutes of sampling
        raise ValueError(f"--output {path}: no file can be written in {path.parent}. Name another folder.")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write each row as {"input_ids": [...], "completion_mask": [...]}; a failed write leaves no file."""
    from rope_patch.checkpoints.full_disk import whole_file

    with whole_file(path) as beside, lzma.open(beside, "wt") if path.suffix == ".xz" else beside.open("w") as file:
        for row in rows:
            file.write(json.dumps({"input_ids": row.ids, "completion_mask": row.labelled}) + "\n")


def contents(rows: Sequence[Row]) -> list[str]:
    """A line for each kind of rows: lengths, and labelled tokens."""
    lines = []
    for kind in KINDS:
        those = [row for row in rows if row.kind == kind]
        if those:
            lengths = sorted(Counter(len(row.ids) for row in those).items(), reverse=True)
            sizes = ", ".join(f"{count:,} of {length:,} tokens" for length, count in lengths)
            labelled = sum(sum(row.labelled) for row in those)
            lines.append(f"{kind}: {sizes}; {labelled:,} tokens are labelled")
    tokens = sum(len(row.ids) for row in rows)
    return [*lines, f"together: {len(rows):,} rows, {tokens:,} tokens"]
