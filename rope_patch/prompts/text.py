"""Long text to measure on, as rows of equal length."""

import gzip
import json
import lzma
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..layout.special_tokens import SpecialTokens, cut_document


def standard_library_files() -> list[Path]:
    """The sources of Python's standard library, which every user has, the longest first."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in root.rglob("*.py") if "site-packages" not in f.parts]
    return sorted(files, key=lambda f: (-f.stat().st_size, f.name))


JSON_LINES = (".jsonl", ".ndjson", ".jsonl.xz", ".jsonl.gz")
"""Endings of files with a JSON object a line."""

_NO_TEXT = (".json", ".gz", ".xz", ".zst", ".bz2", ".zip", ".parquet", ".arrow")
_FORMS = f"Give text files in UTF-8, or files of one JSON object a line that end with {', '.join(JSON_LINES)}."
_ODD = 64, 1e-3  # unreadable characters that a text may have: so many, or such a share
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, as JSON escapes those beyond U+FFFF


def read_texts(paths: Iterable[str | Path]) -> Iterator[str]:
    """The documents in `paths`: whole text files, or the field `text` of each line of .jsonl(.xz, .gz) files.

    A few bytes of a text file that are no UTF-8 become U+FFFD, and so does half of a character in JSON.

    Raises:
        FileNotFoundError: there is no such file, or it is a folder.
        ValueError: a file is neither text nor JSON lines, or a line of these is no JSON object, or has no `text`.
    """
    for path in map(Path, paths):
        require_file(path)
        if is_json_lines(path):
            for number, line in numbered_json_lines(path):
                yield _text_of(line, f"line {number} of {path}")
        else:
            yield _whole_text(path)


def require_file(path: Path) -> None:
    """Raise FileNotFoundError unless there is a file."""
    if not path.is_file():
        why = f"{path} is a folder: name the files in it" if path.is_dir() else f"there is no text file {path}"
        raise FileNotFoundError(f"{why}.")


def _text_of(line: dict[str, Any], where: str) -> str:
    if "text" not in line:
        raise ValueError(f"{where} has no field `text`; it has {', '.join(line)}.")
    if not isinstance(line["text"], str):
        raise ValueError(f"the field `text` of {where} must be a string, got {type(line['text']).__name__}.")
    return line["text"]


def is_json_lines(path: Path) -> bool:
    """Whether a file is read as one JSON object a line, by its name."""
    return path.name.lower().endswith(JSON_LINES)


def _whole_text(path: Path) -> str:
    ending = path.suffix.lower()
    if ending in _NO_TEXT:
        raise ValueError(f"{path} cannot be read as text: it ends with {ending}. {_FORMS}")
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if "\0" in text:
        raise ValueError(f"{path} is no text in UTF-8: it has bytes of zero, as UTF-16 and binary files have. {_FORMS}")
    n_odd, (fewest, share) = text.count("\ufffd"), _ODD
    if n_odd > max(fewest, share * len(text)):
        raise ValueError(f"{path} is no text in UTF-8: {n_odd:,} of {len(text):,} characters are unreadable. {_FORMS}")
    return text


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, one of `JSON_LINES`; empty lines are skipped.

    Raises:
        ValueError: a line is no JSON object, or the file is no UTF-8, or not compressed as its name says.
    """
    return (row for _, row in numbered_json_lines(path))


def numbered_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """As `read_json_lines`, each object with the number of its line, from 1."""
    return ((number, _object(line, f"line {number} of {path}")) for number, line in numbered_lines(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file of JSON lines that are not empty, as text, each with its number from 1.

    Raises:
        ValueError: the file is no UTF-8, or not compressed as its name says.
    """
    ending = path.suffix.lower()
    try:
        with _OPEN.get(ending, open)(path, "rt", encoding="utf-8-sig") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason}. Write it anew in UTF-8.") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is cut, or no {ending} file: {error}. Compress it anew, or rename it.") from error


_OPEN: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}


def read_json(text: str) -> Any:
    """The value of a JSON text; half of a character, which JSON can hold and no tokenizer takes, becomes U+FFFD."""
    value = json.loads(text)
    if not _SURROGATE.search(text):
        return value
    whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(whole)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = read_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON object: {error}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object, but {type(row).__name__}.")
    return row


def text_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, seq_len: int, n_rows: int, max_per_text: int = 1
) -> torch.Tensor:
    """Tokenize `texts` until there are `n_rows` rows of `seq_len` tokens, none overlapping another.

    A row is one document where that is long enough; shorter ones are joined, in order. Each row begins as the tokenizer
    begins a text: a model that has read a beginning-of-sequence token before every text predicts worse without it.

    Args:
        tokenizer: of the model.
        texts: documents, long ones first if there are any.
        seq_len: tokens in a row, special ones included.
        n_rows: rows wanted.
        max_per_text: rows taken from one document at most, so that a few long ones do not fill all.

    Returns:
        int64 [n_rows, seq_len].

    Raises:
        ValueError: the texts are too short.
    """
    special = SpecialTokens.of(tokenizer)
    rows: list[list[int]] = []
    rest: list[int] = []
    n_left = 0
    for text in texts:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        whole = cut_document(ids, seq_len, special, keep_rest=False)
        n_left += len(whole[max_per_text:])
        whole = whole[:max_per_text]
        rows += whole
        if not whole:
            rest += ids
            joined = cut_document(rest, seq_len, special, keep_rest=False)[:1]
            if joined:
                rows += joined
                rest = []
        if len(rows) >= n_rows:
            return torch.tensor(rows[:n_rows])
    few = f"the texts give {len(rows)} rows of {seq_len} tokens; {n_rows} are needed."
    if len(rows) + n_left < n_rows:
        raise ValueError(f"{few} Give more or longer ones.")
    raise ValueError(
        f"{few} {max_per_text} of a text at most {'are' if max_per_text > 1 else 'is'} taken, so that rows are not all "
        "alike: give more texts, such as a long one cut into parts, or ask for fewer rows."
    )
