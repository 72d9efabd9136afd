"""Cut documents that are longer than a row into rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from rope_patch.layout.special_tokens import SpecialTokens, cut_document

STAY_WHOLE = ("messages", "conversations", "prompt", "completion", "completion_mask", "assistant_masks")
"""Columns of data that lose their meaning when cut, as an answer without its question."""

Rows = dict[str, list[list[int]]]


def begin_of(ids: Sequence[int], begin: Sequence[int]) -> tuple[int, ...]:
    """`begin`, the tokenizer's tokens before a text, if the document begins with them, else nothing."""
    return tuple(begin) if list(ids[: len(begin)]) == list(begin) else ()


def cut_ids(ids: Sequence[int], seq_len: int, begin: Sequence[int]) -> list[list[int]]:
    """Rows of at most `seq_len` tokens of a tokenized text with its special tokens.

    Each row begins with the tokens that the tokenizer puts before a text, if the document does. Only the last row has
    the tokens after a text.
    """
    return _cut(ids, seq_len, len(begin_of(ids, begin))) if len(ids) > seq_len else [list(ids)]


def _cut(values: Sequence[int], seq_len: int, n_begin: int) -> list[list[int]]:
    """Rows that each begin with the first `n_begin` values, followed by a part of the others."""
    head = values[:n_begin]
    rows = cut_document(values[n_begin:], seq_len, SpecialTokens(tuple(head)))
    if len(rows[-1]) == n_begin + 1 and seq_len > n_begin + 2:  # one token alone has nothing to be predicted from
        rows[-1] = [*head, rows[-2].pop(), *rows[-1][n_begin:]]
    return rows


def cut_batch(
    batch: Mapping[str, Sequence[Any]], *, max_length: int, begin: Sequence[int], whole: bool, others: bool
) -> dict[str, list[Any]]:
    """Cut the long documents of a batch, their `input_ids` and `labels`.

    Args:
        batch: columns of a dataset.
        max_length: tokens of a row, at most.
        begin: token ids that the tokenizer puts before a text.
        whole: whether documents with partly masked labels, such as prompts with answers, stay uncut.
        others: whether each row repeats the other columns of its document.
    """
    made: dict[str, list[Any]] = {name: [] for name in (batch if others else ("input_ids", "labels"))}
    for i, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        if len(ids) <= max_length or (whole and is_masked(labels)):
            rows, row_labels = [ids], [labels]
        else:
            n_begin = len(begin_of(ids, begin))
            # a label stands with its token
            rows, row_labels = _cut(ids, max_length, n_begin), _cut(labels, max_length, n_begin)
        made["input_ids"] += rows
        made["labels"] += row_labels
        for name in made.keys() - {"input_ids", "labels"}:
            made[name] += [batch[name][i]] * len(rows)
    return made


def is_masked(labels: Sequence[int]) -> bool:
    """Whether some tokens after the first have a label and some have none."""
    return -100 in labels[1:] and any(label != -100 for label in labels[1:])


def cut_into_rows(documents: Any, tokenizer: Any, length: int, text_field: str = "text") -> tuple[Dataset, str]:
    """Cut each document into rows of exactly `length` tokens, in order, and drop its shorter last one.

    Each row begins with the tokens that the tokenizer puts before a text, e.g. a beginning-of-sequence token.

    Returns:
        The rows, with a column `input_ids`, and a sentence on how much of the text is in no row.

    Raises:
        ValueError: a stream, no column of texts, or no document that is long enough.

    Source: LinearARD's data preparation of PG-19, which has such a token in the first row of a book only.
    """
    if not isinstance(documents, Dataset) or text_field not in documents.column_names:
        raise ValueError(
            f"documents that are cut into full rows must be a dataset, no stream, with a column {text_field!r}, got a "
            f"{type(documents).__name__} with {', '.join(documents.column_names or ['unknown columns'])}."
        )
    special = SpecialTokens.of(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # verbose=False: no warning that a text is longer than the window, as it is cut below
        encoded = tokenizer(batch[text_field], add_special_tokens=False, verbose=False)["input_ids"]
        return {"ids": [[*ids, *special.end] if ids else [] for ids in encoded]}

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        begin = SpecialTokens(special.begin)  # the end is among the text's tokens already
        return {"input_ids": [row for ids in batch["ids"] for row in cut_document(ids, length, begin, keep_rest=False)]}

    encoded = documents.map(encode, batched=True, batch_size=16, remove_columns=documents.column_names)
    made = encoded.map(cut, batched=True, batch_size=16, remove_columns=["ids"])
    if len(made) == 0:
        raise ValueError(f"no document has {length} tokens: give longer ones, or a smaller max_length.")
    parts = encoded.with_format("arrow").iter(1000)
    tokens = sum(pc.sum(pc.list_value_length(part["ids"])).as_py() for part in parts)
    left = tokens - len(made) * (length - len(special.begin))  # begins are repeated in each row
    coverage = (
        f"{tokens:,} tokens of {len(documents):,} documents give {len(made):,} rows of {length:,}; {left:,} tokens "
        f"({left / tokens:.1%}) are in no row: ends of documents, and documents too short for one."
    )
    return made, coverage
