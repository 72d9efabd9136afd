"""What can be told of a training set before the first step: whether it has text, and the lengths of its documents."""

from collections.abc import Mapping
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset, LargeList, List

from .config import RopeSFTConfig


def require_text(dataset: Any, name: str, args: RopeSFTConfig) -> None:
    """Raise ValueError if there is no text in `dataset`, one or several by name, where TRL looks for it."""
    if isinstance(dataset, Mapping):
        for key, one in dataset.items():
            require_text(one, f"{name}[{key!r}]", args)
        return
    prepared: Any = args.dataset_kwargs or {}
    if not isinstance(dataset, Dataset) or prepared.get("skip_prepare_dataset"):
        return
    columns = dataset.column_names
    if len(dataset) == 0:
        raise ValueError(f"{name} must have at least one row, got none.")
    alone = (args.dataset_text_field, "messages", "conversations", "input_ids")
    if not any(column in columns for column in alone) and not {"prompt", "completion"} <= set(columns):
        raise ValueError(
            f"{name} must have a column {args.dataset_text_field!r}, or prompt and completion, messages, or input_ids, "
            f"got {', '.join(columns)}. Set dataset_text_field if the text has another name."
        )


def document_lengths(dataset: Any) -> torch.Tensor | None:
    """Tokens of each document of a set that TRL has prepared, int64 [documents]; None where only reading all would say.

    Rows are documents, unless they are packed: `seq_lengths` then holds the tokens of those in each.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return None
    column = next((name for name in ("seq_lengths", "input_ids") if name in dataset.column_names), None)
    if column is None or not isinstance(dataset.features[column], List | LargeList):
        return None
    found = []
    for batch in dataset.select_columns([column]).with_format("arrow").iter(1000):
        rows = batch[column]
        lengths = pc.list_flatten(rows) if column == "seq_lengths" else pc.list_value_length(rows)
        found.append(torch.tensor(lengths.to_numpy(), dtype=torch.int64))
    return torch.cat(found) if found else None
