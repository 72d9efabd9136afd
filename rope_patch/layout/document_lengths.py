"""Token counts of the documents of a training set."""

import sys
from typing import Any

import torch

_REPLIES = ("chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids")
"""Columns of TRL's preference trainers; each is a document, after the prompt if there is one."""


def document_lengths(dataset: Any) -> torch.Tensor | None:
    """Tokens of each document of a tokenized set, int64 [documents]; None if one had to read all rows to know.

    A row is a document. A packed row has the tokens of its documents in `seq_lengths`, and a row of preferences has a
    document for each reply.
    """
    datasets = sys.modules.get("datasets")  # imported, if the set is one of its
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
        parts += [before + _tokens(batch, name) for name in replies]  # [rows] each; [documents] for seq_lengths
    return torch.cat(parts) if parts else None


def longest_document(dataset: Any) -> int | None:
    """Tokens of the longest document; None if one had to read all rows to know."""
    lengths = document_lengths(dataset)
    return None if lengths is None else int(lengths.max()) or None  # None also for a set without tokens


def _tokens(batch: Any, name: str) -> torch.Tensor:
    """Tokens of the documents in a column of an arrow table."""
    import pyarrow.compute as pc

    lengths = pc.list_flatten(batch[name]) if name == "seq_lengths" else pc.list_value_length(batch[name])
    return torch.tensor(lengths.to_numpy(), dtype=torch.int64)
