"""The adapters of a recipe."""

import re
from typing import TYPE_CHECKING, Any

from trl import ModelConfig, get_peft_config

if TYPE_CHECKING:
    from peft import PeftConfig

_NAME = re.compile(r"[\w.]+")  # of a module, or its end


def adapter_config(model: ModelConfig) -> "PeftConfig | None":
    """[`~trl.get_peft_config`], None without `use_peft`, in which a single module name works.

    TRL passes a single entry of `lora_target_modules` on as a text, which allows "all-linear" and patterns. PEFT takes
    every other text as a pattern of whole names: `q_proj` alone would match no module.
    """
    config: Any = get_peft_config(model)
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str) and _NAME.fullmatch(targets):
        config.target_modules = {targets}
    return config
