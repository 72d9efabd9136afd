"""Read the text that a recipe trains and evaluates on."""

import hashlib
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, load_dataset
from transformers import set_seed
from trl import DatasetMixtureConfig, ScriptArguments, get_dataset

from ..data.data_files import READ_ERRORS, require_utf8, unreadable
from .stages import Stage


def read_dataset(stage: Stage) -> dict[str, Any]:
    """Rows to train on ("train") and, if the recipe evaluates, to evaluate on ("test").

    Raises:
        ValueError: the text cannot be read, or lacks a split.
    """
    script, data = stage.script, stage.data
    set_seed(stage.training.seed)  # test_split_size draws: the same on all ranks and in resumed runs
    splits = _splits(script, data)
    names = {"train": script.dataset_train_split}
    if script.dataset_train_split not in splits:
        raise ValueError(
            f"dataset_train_split must be one of {', '.join(splits)}, the splits of the text, got "
            f"{script.dataset_train_split!r}."
        )
    if stage.training.eval_strategy != "no":
        names["test"] = script.dataset_test_split
        if script.dataset_test_split not in splits:
            hold_out = "test_split_size to hold a part out, or " if data.datasets else ""
            raise ValueError(
                f"eval_strategy needs a split {script.dataset_test_split!r} and the text has {', '.join(splits)}: set "
                f"{hold_out}dataset_test_split."
            )
    return {name: splits[split] for name, split in names.items()}


def digests(splits: Mapping[str, Any], hashed: dict[str, str]) -> dict[str, str | None]:
    """SHA-256 of the rows of each split, None for a stream; fingerprints of `datasets` differ between processes.

    Args:
        splits: of a text.
        hashed: fingerprint -> digest of what this process has hashed already; it is added to.
    """
    found: dict[str, str | None] = dict.fromkeys(splits)
    for name, split in splits.items():
        if not isinstance(split, Dataset):
            continue
        if split._fingerprint not in hashed:
            digest = hashlib.sha256()
            for batch in split.with_format("arrow").iter(100):  # rows, of which some hold a book
                digest.update(repr(batch.to_pylist()).encode())
            hashed[split._fingerprint] = digest.hexdigest()
        found[name] = hashed[split._fingerprint]
    return found


def _splits(script: ScriptArguments, data: DatasetMixtureConfig) -> Any:
    """Split -> rows."""
    if bool(data.datasets) == bool(script.dataset_name):
        both = "both are given" if data.datasets else "neither is given"
        raise ValueError(
            "the recipe must name the text to train on, under `datasets` (files of yours: path: json, with data_files) "
            f"or as dataset_name (on the hub): {both}."
        )
    if data.datasets:
        read_with, instead = "dataset_name", "datasets (streaming, and name in an entry, are theirs)"
        unread: dict[str, Any] = {name: getattr(script, name) for name in ("dataset_config", "dataset_streaming")}
    else:
        read_with, instead = "datasets", "dataset_name (dataset_streaming and dataset_test_split are its own)"
        unread = {name: getattr(data, name) for name in ("streaming", "test_split_size")}
    for name, value in unread.items():
        if value:
            raise ValueError(f"{name} is read with {read_with}, and has no effect on {instead}, got {value!r}.")
    if data.streaming and data.test_split_size:
        raise ValueError(
            "test_split_size needs the whole dataset, and streaming=True reads it row by row: leave one of the two out."
        )
    names: list[Any] = [entry.data_files or entry.path for entry in data.datasets] or [script.dataset_name]
    try:
        if data.datasets:
            splits = get_dataset(data)
        else:
            splits = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
        for split in splits.values():
            require_utf8(split)
        return splits
    except READ_ERRORS as error:
        raise unreadable(names, error) from error
    except StopIteration as error:  # what `datasets` makes of JSON without a line
        raise unreadable(names, ValueError("a file of it is empty")) from error
