"""Load checkpoints, and refuse those with Python code unless the user allows it."""

from pathlib import Path
from typing import Any

from .json_records import read_record

_OPTION = "trust_remote_code"  # of Transformers' errors, only the refusal of such code names it


def load_pretrained(auto_class: Any, name: str | Path, argument: str = "", **options: Any) -> Any:
    """Call `auto_class.from_pretrained`, which runs no code of a checkpoint, nor asks to, without trust_remote_code.

    Args:
        auto_class: such as AutoConfig.
        name: folder or hub id.
        argument: name of the user's argument, for messages; may be empty.
        **options: of `from_pretrained`.

    Raises:
        ValueError: the checkpoint has Python code and the user did not allow it, a config in its folder is damaged, or
            what `from_pretrained` raises.
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
            "which runs only if you allow it. Read it; then train with `trust_remote_code: true` in a recipe of "
            "`rope-patch train`, or load the model with from_pretrained(..., trust_remote_code=True) and pass it to "
            "patch_model or RopeSFTTrainer. Other commands take models that Transformers knows."
        ) from error
