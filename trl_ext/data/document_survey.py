"""Lengths and labels of the documents of a tokenized dataset, from its Arrow columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset


@dataclass(frozen=True)
class Survey:
    """Documents of a tokenized dataset, one a row.

    Args:
        lengths: tokens of each, int64 [documents].
        teaches: whether a token after the first has a label, and not all tokens are special ones, bool [documents].
        masked: whether some tokens after the first have a label and some have none, bool [documents].
        teaches_kept: `teaches` of what truncation to `limit` keeps.
    """

    lengths: np.ndarray
    teaches: np.ndarray
    masked: np.ndarray
    teaches_kept: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        special: Sequence[int],
        *,
        labelled: bool = True,
        joined: bool = False,
        limit: int | None = None,
        keep_end: bool = False,
    ) -> "Survey":
        """Read a dataset once, by its Arrow columns.

        Args:
            dataset: with `input_ids` and `labels`.
            special: token IDs that are no text.
            labelled: whether the objective reads labels; else every token after the first counts as predicted.
            joined: whether the tokens before a document predict its first one, as in "wrapped" rows.
            limit: tokens of a document that truncation keeps; None keeps all.
            keep_end: whether it keeps the last ones.

        Raises:
            ValueError: a row has more labels than tokens, or fewer.
        """
        special_ids, parts = np.asarray(special), []
        for batch in dataset.select_columns(["input_ids", "labels"]).with_format("arrow").iter(1000):
            ids, lengths = _flat(batch["input_ids"])  # [tokens], [documents]
            ends = np.cumsum(lengths)  # [documents], index behind the last token of each
            begins = ends - lengths
            label_ids, n_labels = _flat(batch["labels"])
            if not np.array_equal(lengths, n_labels):
                raise ValueError("each row must have as many labels, and entries of its masks, as input_ids.")
            own_labels = _counter(label_ids != -100)  # of spans of tokens
            labels = own_labels if labelled else _counter(ids != -100)  # all tokens, as none is -100
            second = np.minimum(begins + 1, ends)  # index of the second token; `ends` where there is none
            predicted = begins if joined else second
            first, last = predicted, ends
            if limit is not None and keep_end:
                # the first token that is kept has nothing before it
                first = np.maximum(second, ends - limit + 1)
            elif limit is not None:
                last = np.minimum(begins + limit, ends)
            has_text = _counter(~np.isin(ids, special_ids))(begins, ends) > 0
            n_own = own_labels(predicted, ends)
            parts.append(
                (
                    lengths,
                    has_text & (labels(predicted, ends) > 0),
                    (n_own > 0) & (n_own < ends - predicted),
                    has_text & (labels(first, last) > 0),
                )
            )
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _counter(flags: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function that counts the set flags in many spans [first, end) at once."""
    if flags.all():  # without an array of sums
        return lambda first, end: end - first
    counts = np.concatenate(([0], np.cumsum(flags)))  # [tokens + 1], set flags before each token
    return lambda first, end: counts[end] - counts[first]


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Values of a column of lists, one after the other, and the length of each row."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    return pc.list_flatten(column).to_numpy(), lengths
