"""What there is to learn in the documents of a tokenized dataset, read off its Arrow columns."""

from collections.abc import Sequence
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
        teaches: whether it has a token to predict: one with a label that is not its first, in a document that holds
            more than special tokens. [documents] bool.
        masked: whether of the tokens behind its first some have a label and some have none, [documents] bool.
        teaches_kept: `teaches` for what truncation to `limit` keeps.
    """

    lengths: np.ndarray
    teaches: np.ndarray
    masked: np.ndarray
    teaches_kept: np.ndarray

    @property
    def tokens(self) -> int:
        """Of all documents."""
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
            special: token ids that are no text.
            labelled: whether the objective reads labels; else each token but the first counts as predicted.
            joined: whether the tokens before a document predict its first one, as in "wrapped" rows.
            limit: tokens of a document that truncation keeps; None keeps all.
            keep_end: whether it keeps the last ones.
        """
        parts = []
        for batch in dataset.select_columns(["input_ids", "labels"]).with_format("arrow").iter(1000):
            ids, lengths = _flat(batch["input_ids"])
            own_labels = _flat(batch["labels"])[0]
            labels = own_labels if labelled else ids
            ends = np.cumsum(lengths)
            place = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
            predicted, has_label, is_text = place >= (0 if joined else 1), labels != -100, ~np.isin(ids, special)
            kept = np.ones_like(has_label)
            if limit is not None:
                dropped = np.repeat(np.maximum(lengths - limit, 0), lengths)
                # the first token that is kept has nothing before it
                kept = place > dropped if keep_end else place < limit

            def rows_with(flags: np.ndarray, lengths: np.ndarray = lengths, ends: np.ndarray = ends) -> np.ndarray:
                counts = np.concatenate(([0], np.cumsum(flags)))
                return counts[ends] > counts[ends - lengths]

            has_text = rows_with(is_text)
            parts.append(
                (
                    lengths,
                    has_text & rows_with(predicted & has_label),
                    rows_with(predicted & (own_labels == -100)) & rows_with(predicted & (own_labels != -100)),
                    has_text & rows_with(kept & predicted & has_label),
                )
            )
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Values of a column of lists, one after the other, and how many each row has."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    return pc.list_flatten(column).to_numpy(), lengths
