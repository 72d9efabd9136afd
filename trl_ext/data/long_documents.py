"""Documents longer than a row, cut into rows that together hold all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rope_patch.layout.special_tokens import SpecialTokens, cut_document

STAY_WHOLE = ("messages", "conversations", "prompt", "completion", "completion_mask", "assistant_masks")
"""Columns of data that lose their meaning where they are cut: an answer without its question."""

Rows = dict[str, list[list[int]]]


def begin_of(ids: Sequence[int], begin: Sequence[int]) -> tuple[int, ...]:
    """The tokens that rows of a document begin with: `begin`, those of the tokenizer, if the document has them."""
    return tuple(begin) if list(ids[: len(begin)]) == list(begin) else ()


def cut_ids(ids: Sequence[int], seq_len: int, begin: Sequence[int]) -> list[list[int]]:
    """Rows of at most `seq_len` tokens of a tokenized text, which has its special tokens already.

    Each row begins as the document does, with the tokens that the tokenizer puts before a text, and the last one alone
    ends as it does.
    """
    return _cut(ids, seq_len, len(begin_of(ids, begin))) if len(ids) > seq_len else [list(ids)]


def _cut(values: Sequence[int], seq_len: int, n_begin: int) -> list[list[int]]:
    """Rows that each begin with the first `n_begin` values, and then go on with the others."""
    head = values[:n_begin]
    rows = cut_document(values[n_begin:], seq_len, SpecialTokens(tuple(head)))
    if len(rows[-1]) == n_begin + 1 and seq_len > n_begin + 2:  # one token alone has nothing to be predicted from
        rows[-1] = [*head, rows[-2].pop(), *rows[-1][n_begin:]]
    return rows


def cut_batch(
    batch: Mapping[str, Sequence[Any]], *, max_length: int, begin: Sequence[int], whole: bool, others: bool
) -> dict[str, list[Any]]:
    """A batch of documents, `input_ids` and `labels`, with its long ones cut.

    Args:
        batch: columns of a dataset.
        max_length: tokens of a row, at most.
        begin: token ids that the tokenizer puts before a text.
        whole: whether documents of which a part has labels, prompts with answers for example, stay as they are.
        others: whether each row repeats the document's other columns.
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
    """Whether of the tokens that could be predicted, all but the first, some have a label and some have none."""
    return -100 in labels[1:] and any(label != -100 for label in labels[1:])
