"""Texts as compact token files, for studies that run where little can be carried to.

Run: python research/experiments/token_text.py FOLDER --train books.jsonl.xz ... --val held-out.jsonl.xz ...
         (--tokenizer MODEL | --vocabulary 16384) [--tokens N] [--val-documents 20] [--val-length 16384]

FOLDER gets `train-00.u16.xz`, `train-01.u16.xz`, ... and `val-00.u16.xz`, little-endian 16-bit ids of whole documents,
each with the separator behind it, and `tokens.json`, which says what they are. English takes about 1.0 byte a token
with a vocabulary of 16384. Ids of a vocabulary beyond 65536 have 32 bits, in files `.u32.xz`. Files of one split may
arrive one after the other: what is there when it is read counts. With --vocabulary a byte-level BPE is trained on the
first part of the training texts and kept in `tokenizer.json`.
"""

import argparse
import json
import lzma
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rope_patch.eval import read_texts

SEPARATOR = "<|endoftext|>"
Ids = NDArray[np.uint16] | NDArray[np.uint32]
DTYPES = {"u16": np.dtype("<u2"), "u32": np.dtype("<u4")}


def kind_of(vocabulary: int) -> str:
    """The ending of files that hold its ids."""
    return "u16" if vocabulary <= 2**16 else "u32"


def filters(dtype: np.dtype[Any]) -> list[dict[str, int]]:
    """Of xz for ids: literals are predicted by their place within one."""
    position = dtype.itemsize.bit_length() - 1
    return [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 4 - position, "lp": position, "pb": position}]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE with a separator of documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoded(
    tokenizer: Tokenizer, texts: Iterable[str], separator: int, length: int | None, dtype: np.dtype[Any]
) -> Iterator[Ids]:
    """Ids of each document, at most `length` of them, and the separator."""
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:length]
        yield np.array([*ids, separator], dtype=dtype)


def write_parts(folder: Path, split: str, documents: Iterable[Ids], part_tokens: int, tokens: int | None) -> int:
    """Write documents until there are `tokens`, in files of about `part_tokens`; how many there are."""
    part: list[Ids] = []
    number = total = 0

    def flush() -> None:
        nonlocal number
        ids = np.concatenate(part)
        kind = next(kind for kind, dtype in DTYPES.items() if dtype == ids.dtype)
        packed = lzma.compress(ids.tobytes(), filters=filters(ids.dtype))
        (folder / f"{split}-{number:02}.{kind}.xz").write_bytes(packed)
        number += 1
        part.clear()

    for document in documents:
        part.append(document if tokens is None else document[: tokens - total])
        total += len(part[-1])
        if sum(map(len, part)) >= part_tokens:
            flush()
        if total == tokens:
            break
    if part:
        flush()
    return total


def read_stream(folder: Path, split: str) -> Ids:
    """All ids of a split, documents and separators, in order."""
    kind = kind_of(read_facts(folder)["vocabulary"])
    files = sorted(folder.glob(f"{split}-*.{kind}.xz"))
    if not files:
        raise FileNotFoundError(
            f"{folder} has no {split}-00.{kind}.xz: make it with research/experiments/token_text.py."
        )
    return np.concatenate([np.frombuffer(lzma.decompress(f.read_bytes()), dtype=DTYPES[kind]) for f in files])


def read_facts(folder: Path) -> dict[str, Any]:
    """What `tokens.json` says: separator, vocabulary, texts and counts."""
    return json.loads((folder / "tokens.json").read_text(encoding="utf-8"))


def read_documents(folder: Path, split: str) -> list[Ids]:
    """The documents of a split, without separators."""
    stream = read_stream(folder, split)
    ends = np.flatnonzero(stream == read_facts(folder)["separator"])
    parts = np.split(stream, ends + 1)
    return [p[:-1] if k < len(ends) else p for k, p in enumerate(parts) if len(p) > 1]


def first_rows(folder: Path, split: str, length: int, n_rows: int) -> NDArray[np.int64]:
    """The first `length` tokens of the first `n_rows` documents that have as many, [n_rows, length].

    Raises:
        ValueError: there are fewer.
    """
    rows = [d[:length] for d in read_documents(folder, split) if len(d) >= length][:n_rows]
    if len(rows) < n_rows:
        raise ValueError(f"{folder} has {len(rows)} documents of {length} tokens in {split!r}; {n_rows} are needed.")
    return np.stack(rows).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--val", nargs="+", required=True)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", type=Path, help="folder of a model; its tokenizer.json is taken")
    kind.add_argument("--vocabulary", type=int, help="entries of a BPE that is trained on the texts")
    parser.add_argument("--separator", default=SEPARATOR, help="token between documents")
    parser.add_argument("--tokens", type=int, help="of the training split; default: all")
    parser.add_argument("--part-tokens", type=int, default=24_000_000, help="in a file")
    parser.add_argument("--tokenizer-texts", type=int, default=200, help="documents that the BPE is trained on")
    parser.add_argument("--val-documents", type=int, default=20)
    parser.add_argument(
        "--val-length", type=int, default=16384, help="tokens that are kept of each; shorter are left out"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.vocabulary is not None:
        if args.separator != SEPARATOR:
            parser.error(f"--separator belongs to --tokenizer; a trained BPE has {SEPARATOR}")
        tokenizer = train_tokenizer(islice(read_texts(args.train), args.tokenizer_texts), args.vocabulary)
        tokenizer.save(str(args.folder / "tokenizer.json"))
    else:
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    vocabulary, separator = tokenizer.get_vocab_size(), tokenizer.token_to_id(args.separator)
    if separator is None:
        parser.error(f"--separator must be a token of the vocabulary, got {args.separator!r}")
    dtype = DTYPES[kind_of(vocabulary)]
    long_enough = (
        ids
        for ids in encoded(tokenizer, read_texts(args.val), separator, args.val_length, dtype)
        if len(ids) > args.val_length
    )
    counts = {
        "train": write_parts(
            args.folder,
            "train",
            encoded(tokenizer, read_texts(args.train), separator, None, dtype),
            args.part_tokens,
            args.tokens,
        ),
        "val": write_parts(args.folder, "val", islice(long_enough, args.val_documents), args.part_tokens, None),
    }
    facts = {
        "tokenizer": f"byte-level BPE of {vocabulary}" if args.vocabulary else args.tokenizer.name,
        "vocabulary": vocabulary,
        "separator": separator,
        "tokens": counts,
        "texts": {"train": [Path(p).name for p in args.train], "val": [Path(p).name for p in args.val]},
    }
    (args.folder / "tokens.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    size = sum(f.stat().st_size for f in args.folder.glob("*.xz"))
    print(f"{counts['train']:,} and {counts['val']:,} tokens, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
