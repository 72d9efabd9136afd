"""Refuse to resume with other adapters than the checkpoint's: PEFT would silently load them, or none."""

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from rope_patch.adapters.sidecar import read_adapter_config
from rope_patch.adapters.watch import adapter_configs

from .checkpoint import ADAPTER_CONFIG
from .method_record import differences

logger = logging.get_logger(__name__)

# options that do not change what adapters compute
_MAY_DIFFER = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_weights", "peft_version", "revision",
    "task_type",
)  # fmt: skip
# values of `init_lora_weights` that leave the base weights alone; others, such as PiSSA, change them
_LEAVE_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")


def require_same_adapters(model: nn.Module, checkpoint: str) -> None:
    """Raise ValueError if `checkpoint` and `model` have different adapters, or only one of them has any.

    Only options that both configs have are compared. Another base model passes with a warning: its folder may have
    been moved.
    """
    folder = Path(checkpoint)
    configs = adapter_configs(model)
    if not configs:
        if (folder / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"{checkpoint} is of a run that trained an adapter, and this run trains none: give it the same "
                "peft_config (use_peft=True), or start a new run, without resume_from_checkpoint."
            )
        return
    for name, config in configs.items():
        file = (folder if name == "default" else folder / name) / ADAPTER_CONFIG
        if not file.is_file():
            raise ValueError(
                f"{checkpoint} has no {file.relative_to(folder)}, and this run trains the adapter {name!r}: it is of a "
                "run that trained whole weights, or another adapter. Leave peft_config (use_peft) out, or start a new "
                "run with these weights as the model, without resume_from_checkpoint."
            )
        recorded, current = read_adapter_config(file.parent), config.to_dict()
        others = differences(_compared(recorded), _compared(current))
        if others:
            raise ValueError(
                f"the adapter {name!r} in {checkpoint} has {', '.join(was for was, _ in others)}, and this run has "
                f"{', '.join(now for _, now in others)}. Give the values that it was trained with, or start a new run "
                "from its weights, in another output_dir and without resume_from_checkpoint: load it with "
                "rope_patch.load_adapter(base_model, checkpoint, is_trainable=True)."
            )
        was, now = (each.get("base_model_name_or_path") for each in (recorded, current))
        if was != now:
            logger.warning(
                f"the adapter {name!r} in {checkpoint} was trained on {was}, and this run has {now}: make sure that "
                "both are the same model."
            )


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    """The options that change what is trained, as JSON; names of modules sorted, since PEFT keeps them in sets."""
    kept = {name: value for name, value in config.items() if name not in _MAY_DIFFER}
    if kept.get("init_lora_weights") in _LEAVE_WEIGHTS:
        kept["init_lora_weights"] = True  # these choose first values, which a checkpoint has left behind
    read: dict[str, Any] = json.loads(json.dumps(kept, default=list))
    for name, value in read.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            read[name] = sorted(value)
        elif isinstance(value, dict):  # rank_pattern and the like, as one value: a name that is missing is a difference
            read[name] = json.dumps(value, sort_keys=True)
    return read
