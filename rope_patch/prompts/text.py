"""Text files, and their tokens as rows of equal length."""

import gzip
import json
import lzma
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..layout.special_tokens import SpecialTokens, cut_document


def standard_library_files() -> list[Path]:
    """The source files of Python's standard library, longest first: text that every user has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in root.rglob("*.py") if "site-packages" not in f.parts]
    return sorted(files, key=lambda f: (-f.stat().st_size, f.name))


JSON_LINES = (".jsonl", ".ndjson", ".jsonl.xz", ".jsonl.gz")
"""Suffixes of files with one JSON object a line."""

_NO_TEXT = (".json", ".gz", ".xz", ".zst", ".bz2", ".zip", ".parquet", ".arrow")
_FORMS = f"Give text files in UTF-8, or files of one JSON object a line that end with {', '.join(JSON_LINES)}."
_MOST_UNREADABLE = 64, 1e-3  # characters of a text, and their share; the larger limit holds
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # JSON escapes a character beyond U+FFFF as two surrogates


def read_texts(paths: Iterable[str | Path], chat: Callable[[Any], str] | None = None) -> Iterator[str]:
    """The documents in `paths`: whole text files, or the field `text` of each line of .jsonl(.xz, .gz) files.

    A few invalid bytes of a text file become U+FFFD, and so does a lone surrogate in JSON.

    Args:
        paths: of files.
        chat: makes a text of `messages` in lines that have these and no `text`; None takes no such lines.

    Raises:
        FileNotFoundError: a file does not exist, or it is a folder.
        ValueError: a file is neither text nor JSON lines, or a line is no JSON object with a string `text`.
    """
    for path in map(Path, paths):
        require_file(path)
        if not is_json_lines(path):
            yield _whole_text(path)
            continue
        for number, line in numbered_json_lines(path):
            yield text_of(line, f"line {number} of {path}", chat)


def text_of(row: Mapping[str, Any], where: str, chat: Callable[[Any], str] | None = None) -> str:
    """The document of a row that errors call `where`; `chat` as in `read_texts`."""
    if chat is not None and "text" not in row and row.get("messages"):
        return chat(row["messages"])
    if "text" not in row:
        raise ValueError(f"{where} has no field `text`; it has {', '.join(row)}.")
    if not isinstance(row["text"], str):
        raise ValueError(f"the field `text` of {where} must be a string, got {type(row['text']).__name__}.")
    return row["text"]


def require_file(path: Path) -> None:
    """Raise FileNotFoundError if there is no file at `path`."""
    if not path.is_file():
        why = f"{path} is a folder: name the files in it" if path.is_dir() else f"there is no text file {path}"
        raise FileNotFoundError(f"{why}.")


def is_json_lines(path: Path) -> bool:
    """Whether a file has one JSON object a line, by its name."""
    return path.name.lower().endswith(JSON_LINES)


def _whole_text(path: Path) -> str:
    ending = path.suffix.lower()
    if ending in _NO_TEXT:
        raise ValueError(f"{path} cannot be read as text: it ends with {ending}. {_FORMS}")
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if "\0" in text:
        raise ValueError(f"{path} is no text in UTF-8: it has bytes of zero, as UTF-16 and binary files have. {_FORMS}")
    n_unreadable, (number, share) = text.count("\ufffd"), _MOST_UNREADABLE
    if n_unreadable > max(number, share * len(text)):
        raise ValueError(
            f"{path} is no text in UTF-8: {n_unreadable:,} of {len(text):,} characters are unreadable. {_FORMS}"
        )
    return text


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file; empty lines are skipped.

    Raises:
        ValueError: a line is no JSON object, or the file is not in UTF-8, or not compressed as its name says.
    """
    return (row for _, row in numbered_json_lines(path))


def numbered_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of `read_json_lines`, each with its line number, from 1."""
    for number, line in numbered_lines(path):
        try:
            row = read_json(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is no JSON object: {error}.") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {path} is no JSON object, but {type(row).__name__}.")
        yield number, row


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a JSON lines file that are not empty, as text, each with its number, from 1.

    Raises:
        ValueError: the file is not in UTF-8, or not compressed as its name says.
    """
    ending = path.suffix.lower()
    try:
        with _OPEN.get(ending, open)(path, "rt", encoding="utf-8-sig") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason}. Save it again in UTF-8.") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is cut, or no {ending} file: {error}. Compress it again, or rename it.") from error


_OPEN: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}


def read_json(text: str) -> Any:
    """Parse JSON; a lone surrogate, which JSON can hold and no tokenizer accepts, becomes U+FFFD."""
    value = json.loads(text)
    if not _SURROGATE.search(text):
        return value
    whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(whole)


def text_rows(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, seq_len: int, n_rows: int, max_per_text: int = 1
) -> torch.Tensor:
    """Tokenize `texts` until there are `n_rows` rows of `seq_len` tokens, which do not overlap.

    A document that is long enough gives whole rows; shorter ones are joined, in order. Each row begins with the
    tokenizer's beginning-of-sequence token, if it has one: a model that was trained with it predicts worse without it.

    Args:
        tokenizer: of the model.
        texts: documents, long ones first if there are any.
        seq_len: tokens of a row, special ones included.
        n_rows: number of rows.
        max_per_text: most rows from one document, so that a few long ones do not fill all.

    Returns:
        int64 [n_rows, seq_len].

    Raises:
        ValueError: the texts are too short.
    """
    special = SpecialTokens.of(tokenizer)
    rows: list[list[int]] = []
    short: list[int] = []  # tokens of joined short documents
    n_left_out = 0
    for text in texts:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        whole = cut_document(ids, seq_len, special, keep_rest=False)
        n_left_out += len(whole[max_per_text:])
        if not whole:
            short += ids
            whole = cut_document(short, seq_len, special, keep_rest=False)[:1]
            if whole:
                short = []
        rows += whole[:max_per_text]
        if len(rows) >= n_rows:
            return torch.tensor(rows[:n_rows])
    few = f"the texts give {len(rows)} rows of {seq_len} tokens; {n_rows} are needed."
    if len(rows) + n_left_out < n_rows:
        raise ValueError(f"{few} Give more or longer ones.")
    raise ValueError(
        f"{few} {max_per_text} of a text at most {'are' if max_per_text > 1 else 'is'} taken, so that rows differ: "
        "give more texts, such as a long one cut into parts, or ask for fewer rows."
    )
