"""Refuse to resume a run on other rows, or in another order: it would read rows twice or skip some."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from rope_patch.model_card import read_runs

from ..config import RopeSFTConfig
from .method_record import differences

_HASHED = 256  # rows, evenly spaced: hashed at each checkpoint
_COLUMNS = ("input_ids", "labels", "completion_mask", "assistant_masks")


def data_facts(dataset: Any, args: RopeSFTConfig) -> dict[str, Any]:
    """What decides which rows each step reads: hashes of tokens, labels and masks, and the order.

    Args:
        dataset: the prepared training set. For a stream, and without a column `input_ids`, the result is {}.
        args: of the trainer.
    """
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return {}
    strategy = args.train_sampling_strategy
    order = str(getattr(strategy, "value", strategy))
    if order != "sequential":
        # which shuffles; a sequential run reads rows as they are
        order += f", seed {args.seed if args.data_seed is None else args.data_seed}"
    hashes = {name: _column_hash(dataset, name) for name in _COLUMNS if name in dataset.column_names}
    return {"row_hashes": hashes, "order": order}


def require_same_data(dataset: Any, args: RopeSFTConfig, checkpoint: str) -> None:
    """Raise ValueError if the run in `checkpoint` read other rows, or the same rows in another order.

    A checkpoint of plain TRL records no rows and passes. So does `ignore_data_skip`, which begins with the first row.
    """
    runs = read_runs(checkpoint)
    before: Mapping[str, Any] = runs[-1].get("run", {}) if runs else {}
    if args.ignore_data_skip or "row_hashes" not in before or not (now := data_facts(dataset, args)):
        return
    if before["rows"] != len(dataset):
        differs = f"{before['rows']:,} training rows, and this run has {len(dataset):,}"
    elif differences(before["row_hashes"], now["row_hashes"]):  # of columns that both runs have
        differs = "training rows of other tokens than this run"
    elif before.get("order") != now["order"]:
        differs = f"its rows in the order {before.get('order')!r}, and this run in {now['order']!r}"
    else:
        return
    raise ValueError(
        f"{checkpoint} has {differs}: the remaining steps would read rows twice, or leave some out. Give the text, "
        "max_length and seed that it was trained with, or ignore_data_skip=True, which begins with the first row "
        "again, or start a new run from its weights, in another output_dir and without resume_from_checkpoint."
    )


def _column_hash(dataset: Dataset, name: str) -> str:
    """A hash of a column in up to `_HASHED` rows."""
    count = min(len(dataset), _HASHED)
    picked = sorted({round(i * (len(dataset) - 1) / max(count - 1, 1)) for i in range(count)})
    hashed = hashlib.sha256()
    column = dataset.select_columns([name]).with_format("arrow").select(picked)[:].column(name)
    of = getattr(column.type, "value_type", pa.null())
    is_flat = pa.types.is_integer(of) or pa.types.is_boolean(of)
    for chunk in column.chunks:
        for row in chunk:
            plain = is_flat and row.is_valid
            hashed.update(np.asarray(row.values, dtype=np.int64).tobytes() if plain else str(row).encode())
            hashed.update(b"|")  # the end of a row, so that a token cannot move to the next one
    return hashed.hexdigest()[:16]
