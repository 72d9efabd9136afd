"""How many tokens the documents of a training set have, by the columns that trainers read."""

import sys
from typing import Any

import torch

_REPLIES = ("chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids")
"""Columns of TRL's trainers of preferences; each of them is a document, behind the prompt if there is one."""


def document_lengths(dataset: Any) -> torch.Tensor | None:
    """Tokens of each document of a set that is tokenized, int64 [documents]; None where only reading all would say.

    Rows are documents, unless they are packed: `seq_lengths` then holds the tokens of those in each. Rows of
    preferences are a document for each reply.
    """
    datasets = sys.modules.get("datasets")  # which whoever made such a set has imported
    if datasets is None or not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return None
    names = dataset.column_names
    text = next(([name] for name in ("seq_lengths", "input_ids") if name in names), None)
    replies = text or [name for name in _REPLIES if name in names]
    prompt = [] if text else [name for name in ("prompt_ids",) if name in names]
    lists = datasets.List | datasets.LargeList
    if not replies or not all(isinstance(dataset.features[name], lists) for name in prompt + replies):
        return None
    parts = []
    for batch in dataset.select_columns(prompt + replies).with_format("arrow").iter(1000):
        before = sum(_tokens(batch, name) for name in prompt)
        parts += [before + _tokens(batch, name) for name in replies]
    return torch.cat(parts) if parts else None


def longest_document(dataset: Any) -> int | None:
    """Tokens of the longest document, None where only reading all of them would say."""
    lengths = document_lengths(dataset)
    return None if lengths is None else int(lengths.max()) or None


def _tokens(batch: Any, name: str) -> torch.Tensor:
    """Of the documents in a column of an arrow table."""
    import pyarrow.compute as pc

    lengths = pc.list_flatten(batch[name]) if name == "seq_lengths" else pc.list_value_length(batch[name])
    return torch.tensor(lengths.to_numpy(), dtype=torch.int64)
