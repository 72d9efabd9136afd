"""Checkpoints that come with Python code of their own, which Transformers runs where a user says so alone."""

from pathlib import Path
from typing import Any

from .json_records import read_record

_OPTION = "trust_remote_code"  # Transformers names it in its refusal, and in no other


def load_pretrained(auto_class: Any, name: str | Path, argument: str = "", **options: Any) -> Any:
    """What `auto_class.from_pretrained` gives: without trust_remote_code no code of a checkpoint runs or is asked for.

    Args:
        auto_class: of Transformers, as AutoConfig.
        name: folder or hub id.
        argument: what the user gave it as; empty where that is plain.
        **options: of `from_pretrained`.

    Raises:
        ValueError: the checkpoint has code of its own that is not to run, a config in its folder is damaged, or what
            `from_pretrained` raises.
    """
    for config in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (file := Path(name, config)).is_file():
            read_record(file, "Save or download the model again.")
    try:
        return auto_class.from_pretrained(name, **{_OPTION: False, **options})
    except ValueError as error:
        if _OPTION not in str(error):
            raise
        raise ValueError(
            f"{argument}{': ' if argument else ''}{name} comes with Python code of its own (auto_map in its config), "
            "which runs where you say so alone. Read it; then train with `trust_remote_code: true` in a recipe of "
            "`rope-patch train`, or load the model with from_pretrained(..., trust_remote_code=True) and give that to "
            "patch_model or RopeSFTTrainer. Other commands take models that Transformers knows."
        ) from error
