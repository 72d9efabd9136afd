"""Long text to measure on, as rows of equal length."""

import json
import lzma
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..special_tokens import SpecialTokens, cut_document


def standard_library_files() -> list[Path]:
    """The sources of Python's standard library, which every user has, the longest first."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in root.rglob("*.py") if "site-packages" not in f.parts]
    return sorted(files, key=lambda f: (-f.stat().st_size, f.name))


def read_texts(paths: Iterable[str | Path]) -> Iterator[str]:
    """The documents in `paths`: whole text files, or the field `text` of each line of .jsonl and .jsonl.xz files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line of a .jsonl file is no JSON object, or has no `text`.
    """
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"there is no text file {path}.")
        if path.name.endswith((".jsonl", ".jsonl.xz")):
            for number, line in enumerate(read_json_lines(path), 1):
                text = line.get("text")
                if not isinstance(text, str):
                    raise ValueError(f"line {number} of {path} has no field `text`; it has {', '.join(line)}.")
                yield text
        else:
            yield path.read_text(encoding="utf-8", errors="replace")


def read_json_lines(path: Path) -> Iterator[dict[str, object]]:
    """The objects of a .jsonl or .jsonl.xz file.

    Raises:
        ValueError: a line is no JSON object.
    """
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {path} is no JSON object: {error}.") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of {path} is no JSON object, but {type(row).__name__}.")
            yield row


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
    if seq_len < 2 or n_rows < 1 or max_per_text < 1:
        raise ValueError(
            f"seq_len must be at least 2, n_rows and max_per_text at least 1, got {seq_len}, {n_rows}, {max_per_text}."
        )
    special = SpecialTokens.of(tokenizer)
    rows: list[list[int]] = []
    rest: list[int] = []
    for text in texts:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        whole = cut_document(ids, seq_len, special, keep_rest=False)[:max_per_text]
        rows += whole
        if not whole:
            rest += ids
            joined = cut_document(rest, seq_len, special, keep_rest=False)[:1]
            if joined:
                rows += joined
                rest = []
        if len(rows) >= n_rows:
            return torch.tensor(rows[:n_rows])
    raise ValueError(
        f"the texts give {len(rows)} rows of {seq_len} tokens; {n_rows} are needed. Give more or longer ones."
    )
