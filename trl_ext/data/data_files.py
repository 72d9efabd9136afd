"""Errors for files that `datasets` cannot read, which name the line that its own errors leave out."""

import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from datasets.exceptions import DatasetsError

from rope_patch.prompts.text import is_json_lines, numbered_lines

READ_ERRORS = (DatasetsError, OSError, EOFError, UnicodeError, lzma.LZMAError, zlib.error, pa.ArrowInvalid)
"""What `datasets` raises for files that are missing, incomplete, wrongly compressed or no text."""


def require_utf8(rows: Any) -> None:
    """Raise `pyarrow.ArrowInvalid` if strings in a `Dataset` are no UTF-8, which the JSON reader does not check."""
    if isinstance(rows, Dataset):
        for part in rows.with_format("arrow").iter(1000):
            part.validate(full=True)


def unreadable(names: Sequence[Any], error: Exception) -> ValueError:
    """The error for text that cannot be read; `names` are its files, as `data_files` takes them, or datasets."""
    sources = [name for named in names for name in _each(named)]
    files = [Path(file) for name in sources for file in sorted(glob(name))]
    why = str(error.__cause__ or error)  # DatasetGenerationError hides its cause
    place = next(filter(None, map(_wrong_line, files)), "") if "JSON parse error" in why else ""
    return ValueError(f"the text in {', '.join(sources)} cannot be read: {why.rstrip('.')}{place}.")


def _each(named: Any) -> Iterator[str]:
    """The names in a string, a list, or lists by split."""
    if isinstance(named, str | Path):
        yield str(named)
    else:
        for part in named.values() if isinstance(named, Mapping) else named:
            yield from _each(part)


def _wrong_line(file: Path) -> str:
    """The first line that is no JSON or holds half of a character; `datasets` counts lines within a chunk only."""
    for number, line in numbered_lines(file) if is_json_lines(file) else ():
        try:
            # JSON may escape half of a surrogate pair, which UTF-8 cannot encode: UnicodeEncodeError
            json.dumps(json.loads(line), ensure_ascii=False).encode()
        except ValueError:
            return f", in line {number} of {file}"
    return ""
