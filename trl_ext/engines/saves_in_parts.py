"""Saves under FSDP's SHARDED_STATE_DICT, where each rank writes its own part of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME


def saves_in_parts(accelerator: Accelerator) -> bool:
    """Whether Trainer leaves it to FSDP to write weights, each rank its own."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)  # of a state that has one
    return plugin is not None and "FULL" not in str(plugin.state_dict_type)  # FULL_STATE_DICT: rank 0 writes all


@contextmanager
def weights_gathered(accelerator: Accelerator) -> Iterator[None]:
    """Let Trainer write whole weights, which it does not where FSDP writes checkpoints in parts."""
    if not saves_in_parts(accelerator):
        yield
        return
    from torch.distributed.fsdp import StateDictType  # not every build of torch has it

    plugin: Any = accelerator.state.fsdp_plugin
    kind, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = kind


def remove_weights(folder: Path) -> None:
    """Take away the files of weights, of a save that was made for what is beside them."""
    for name in (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME):
        (folder / name).unlink(missing_ok=True)
