"""The adapters that a recipe asks for."""

import re
from typing import TYPE_CHECKING, Any

from trl import ModelConfig, get_peft_config

if TYPE_CHECKING:
    from peft import PeftConfig

_NAME = re.compile(r"[\w.]+")  # of a module, or its end


def adapter_config(model: ModelConfig) -> "PeftConfig | None":
    """[`~trl.get_peft_config`] in which a single module name works as `lora_target_modules`.

    TRL hands a single entry of `lora_target_modules` on as a text, so that "all-linear" and patterns can be given, and
    PEFT takes every other text as a pattern of whole names: `q_proj` alone would find no module.

    Args:
        model: whose fields say what adapters there are.

    Returns:
        None without `use_peft`.
    """
    config: Any = get_peft_config(model)
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str) and _NAME.fullmatch(targets):
        config.target_modules = {targets}
    return config
