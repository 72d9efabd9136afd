"""A pytest plugin for TRL's own tests: data from the stand-ins, and our trainer in place of TRL's.

`ROPE_SFT_OPTIONS`, a JSON object of fields of `RopeSFTConfig`, puts `RopeSFTTrainer` and a config with these defaults
where TRL's tests import `SFTTrainer` and `SFTConfig` from. Without it TRL's own run.
"""

import dataclasses
import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import trl


def load_dataset(path: str, name: str = "default", split: str | None = None, streaming: bool = False) -> Any:
    """`datasets.load_dataset` from the folder of stand-ins, which the tests run in; a split may end with "[:n]"."""
    splits = datasets.load_from_disk(str(Path(path) / name))
    if split is not None:
        split_name, _, slice_end = split.partition("[:")
        dataset = splits[split_name]
        dataset = dataset.select(range(int(slice_end.rstrip("]")))) if slice_end else dataset
        return dataset.to_iterable_dataset() if streaming else dataset
    if streaming:
        return datasets.IterableDatasetDict({key: each.to_iterable_dataset() for key, each in splits.items()})
    return splits


def tolerate_renamed(module: ModuleType) -> None:
    """Let tests of another version of TRL import what `module` does not have; a test that uses it fails."""

    def stand_in(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None  # for the questions whether a package is available: no

    module.__getattr__ = stand_in  # type: ignore[method-assign]


def put_ours_in_place(options: dict[str, Any]) -> None:
    import trl_ext.trainer.trainer
    from trl_ext import RopeSFTConfig, RopeSFTTrainer

    defaults = [
        (name, Any, dataclasses.field(default_factory=lambda value=value: json.loads(json.dumps(value))))
        for name, value in options.items()
    ]
    config = dataclasses.make_dataclass("ConfigInPlace", defaults, bases=(RopeSFTConfig,))
    config.__module__, globals()["ConfigInPlace"] = __name__, config  # checkpoints hold it, by this name
    trl_ext.trainer.trainer.RopeSFTConfig = config  # what a trainer without args makes
    trl.SFTTrainer, trl.SFTConfig = RopeSFTTrainer, config


datasets.load_dataset = load_dataset
for module in ("trl.import_utils", "trl.trainer.sft_trainer"):
    tolerate_renamed(importlib.import_module(module))
if "ROPE_SFT_OPTIONS" in os.environ:
    put_ours_in_place(json.loads(os.environ["ROPE_SFT_OPTIONS"]))
