"""Refuse datasets that TRL would misread, or end with a traceback on, and name the row."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, LargeList, List

from ..config import RopeSFTConfig


def named_sets(dataset: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The sets in `dataset` (one, several by name, or None), each with its name for messages."""
    if isinstance(dataset, Mapping):
        for key, part in dataset.items():
            yield f"{name}[{key!r}]", part
    elif dataset is not None:
        yield name, dataset


def column_names(dataset: Any) -> list[str]:
    """Columns of a dataset; a stream of computed rows names them in its first row alone."""
    return list(next(iter(dataset), ()) if dataset.column_names is None else dataset.column_names)


def has_lists(dataset: Dataset, *columns: str) -> bool:
    """Whether these columns hold a list in each row, as token IDs and labels do."""
    return all(isinstance(dataset.features.get(column), List | LargeList) for column in columns)


def require_text(dataset: Any, name: str, args: RopeSFTConfig) -> None:
    """Raise ValueError if a dataset (one, or several by name) or a row lacks the text or chat that TRL reads."""
    prepared: Any = args.dataset_kwargs or {}
    if prepared.get("skip_prepare_dataset"):
        return
    for part_name, part in named_sets(dataset, name):
        if isinstance(part, Dataset):
            _require_text_in(part, part_name, args.dataset_text_field)


def _require_text_in(dataset: Dataset, name: str, text_field: str) -> None:
    columns = dataset.column_names
    if len(dataset) == 0:
        raise ValueError(f"{name} must have at least one row, got none.")
    if dataset.format["type"] == "custom":  # a user's function makes the rows
        return
    chats = ("messages", "conversations")  # TRL looks at the first row
    chat = next((c for c in chats if c in columns and (text_field not in columns or dataset[0][c])), None)
    if "input_ids" in columns:
        for column in {"input_ids", "labels"} & set(columns):
            feature = dataset.features[column]
            kind = getattr(feature, "feature", feature)  # of the list's entries
            if not (has_lists(dataset, column) and "int" in str(getattr(kind, "dtype", ""))):
                raise ValueError(f"{name} must have a list of integers in {column!r} of each row, got {feature}.")
    elif {"prompt", "completion"} <= set(columns):
        _require_chats(dataset, name, ("prompt", "completion"))
    elif chat is not None:
        _require_chats(dataset, name, (chat,))
    elif text_field in columns:
        parts = dataset.select_columns([text_field]).with_format("arrow").iter(1000)
        n_missing = sum(part[text_field].null_count for part in parts)
        if n_missing:
            raise ValueError(
                f"{name} must have a text in every row: {n_missing:,} of {len(dataset):,} rows have no {text_field!r}, "
                "or null. Leave these rows out."
            )
        kind = getattr(dataset.features[text_field], "dtype", dataset.features[text_field])
        if kind not in ("string", "large_string", "string_view"):
            raise ValueError(
                f"{name} must have a string in {text_field!r}, got {kind}. Set dataset_text_field to the column of the "
                "text."
            )
    else:
        raise ValueError(
            f"{name} must have a column {text_field!r}, or prompt and completion, messages, or input_ids, "
            f"got {', '.join(columns)}. Set dataset_text_field if the text has another name."
        )


def _require_chats(dataset: Dataset, name: str, columns: tuple[str, ...]) -> None:
    """Raise ValueError for a row without messages, or with prompt and completion that are not both texts or chats."""

    def is_chat(value: Any) -> bool:
        # {"role": ..., "content": ...}, or {"from": ..., "value": ...}, which TRL renames
        return isinstance(value, list) and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role") or ("value" in message and message.get("from")), str)
            for message in value
        )

    kind = "a list" if len(columns) == 1 else "texts, or lists"
    for number, row in enumerate(dataset.select_columns(list(columns)).with_format(None)):
        values = [row[column] for column in columns]
        are_texts = len(values) == 2 and all(isinstance(value, str) for value in values)
        if not are_texts and not (all(map(is_chat, values)) and values[0]):
            raise ValueError(
                f"{name}: row {number} must have in {' and '.join(map(repr, columns))} {kind} of messages with a role "
                f"and content, such as [{{'role': 'user', 'content': '...'}}], got {row!r:.120}. Correct the row, or "
                "leave it out."
            )


def require_kept_borders(dataset: Any, name: str, args: RopeSFTConfig, packing: bool) -> None:
    """Raise ValueError if rows of `dataset` hold several documents that TRL's collator would not keep apart.

    Args:
        dataset: as the user gave it.
        name: of it, for messages.
        args: of the trainer.
        packing: whether it will be packed.
    """
    packs = args.packing_strategy != "wrapped"
    if args.padding_free or (args.packing and packs):
        return
    packed = isinstance(dataset, Dataset | IterableDataset) and "seq_lengths" in column_names(dataset)
    if packed or (packing and packs):
        why = "it has a column seq_lengths" if packed else f"eval_packing={args.eval_packing}"
        raise ValueError(
            f"rows of {name} hold several documents ({why}), which are kept apart only with padding_free=True, or "
            f"packing=True and packing_strategy='bfd_split' or 'bfd'; got padding_free={args.padding_free}, "
            f"packing={args.packing}, packing_strategy={args.packing_strategy!r}. Set padding_free=True, or give "
            "one document a row and do not pack them."
        )


def require_known_tokens(dataset: Any, name: str, vocab_size: int | None) -> None:
    """Raise ValueError if a row has a token or label without an embedding: a GPU would stop with an assertion.

    Args:
        dataset: tokenized; a stream is not checked.
        name: of it, for messages.
        vocab_size: of the model.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom" or vocab_size is None:
        return
    for column in [c for c in ("input_ids", "labels") if has_lists(dataset, c)]:
        first = 0  # row of the batch
        for batch in dataset.select_columns([column]).with_format("arrow").iter(1000):
            ids = pc.list_flatten(batch[column]).to_numpy()  # [tokens] of a thousand rows
            unknown = ((ids < 0) | (ids >= vocab_size)) & ((ids != -100) | (column == "input_ids"))
            if unknown.any():
                at = int(unknown.argmax())
                # [rows], index behind the last token of each row
                ends = np.cumsum(pc.list_value_length(batch[column]).to_numpy())
                masked = ", or -100 for none" if column == "labels" else ""
                raise ValueError(
                    f"{name}: row {first + int(np.searchsorted(ends, at, side='right'))} of its tokenized rows has "
                    f"{ids[at]} in {column!r}, and the model knows tokens 0 to {vocab_size - 1}{masked}. Use the "
                    "model's own tokenizer, or, if you added tokens to it, call "
                    "model.resize_token_embeddings(len(tokenizer))."
                )
            first += len(batch)
