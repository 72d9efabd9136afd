"""From a recipe of a restoration to the restored model: what `rope-patch train` does with keys such as `distil`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, load_dataset
from trl import ModelConfig, get_quantization_config

from rope_patch.base.empty_folders import without_empty_folders
from rope_patch.eval.report import require_writable
from rope_patch.export import PROGRAMS

from ..data.data_files import READ_ERRORS, require_utf8, unreadable
from ..runs.model_files import begun_with, recorded_commit
from .adapter_config import adapter_config
from .fine_tuning import require_model, require_other_folder
from .recipe import RecipeParser, leave_precision_to_recipe
from .restoration import RECORD, restore
from .stopped import SAME_COMMAND_GOES_ON


@dataclass
class RestoreArguments:
    """What is restored, on which text, in which steps."""

    output_dir: str = field(metadata={"help": "For checkpoints, restore.json and the result."})
    rescale: str = field(metadata={"help": "Rescaling of the RoPE frequencies: pi, ntk, abf, yarn, longrope, llama3."})
    text: list[str] = field(metadata={"help": "JSON lines with long documents under `text`."})
    rescale_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Its options, e.g. '{\"factor\": 4.0}'."}
    )
    distil: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "RopeSFTConfig fields of stage 1 that differ."}
    )
    extend: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "RopeSFTConfig fields of stage 2 that differ."}
    )
    skip_extension: bool = field(default=False, metadata={"help": "Stop after stage 1."})

    def __post_init__(self) -> None:
        for name in ("rescale_args", "distil", "extend"):
            value = getattr(self, name) or {}
            wrong = ValueError(f"{name} must be a JSON object such as '{{\"factor\": 4.0}}', got {value!r}.")
            try:
                options = json.loads(value) if isinstance(value, str) else value
            except json.JSONDecodeError as error:
                raise wrong from error
            if not isinstance(options, dict):
                raise wrong
            setattr(self, name, options)


FIELDS = (RestoreArguments, ModelConfig)
"""Whose fields are keys of a recipe and flags of the command line."""


def restore_recipe(arguments: Sequence[str] | None = None) -> None:
    """Run `restore` as a recipe says, and print where the result is and the command that serves it.

    Args:
        arguments: `--config RECIPE.yaml` and flags, which win; None takes those of the process.

    Raises:
        ValueError: the recipe is wrong, or model, text and settings do not go together.
        OSError: a file that is not there, or a folder that cannot be written.
    """
    leave_precision_to_recipe()
    parser = RecipeParser(FIELDS, kind="a recipe of a restoration", prog="rope-patch train")
    parser.set_defaults(dtype=None)  # TRL's is float32, also of a base under adapters
    restoration, model = parser.parse_args_and_config(arguments)
    begun = begun_with(Path(restoration.output_dir, RECORD))
    require_model(model, recorded_commit(begun, str(model.model_name_or_path), model.model_revision))
    require_other_folder(restoration.output_dir, model)
    try:
        with without_empty_folders(Path(restoration.output_dir)):
            require_writable(restoration.output_dir)
            result = restore(
                model.model_name_or_path,
                _documents(restoration.text),
                restoration.output_dir,
                rescale=restoration.rescale,
                rescale_args=restoration.rescale_args,
                peft_config=adapter_config(model),
                quantization_config=get_quantization_config(model),
                dtype=model.dtype,
                model_init_kwargs={"attn_implementation": model.attn_implementation, "revision": model.model_revision},
                distil=restoration.distil,
                extend=restoration.extend,
                skip_extension=restoration.skip_extension,
            )
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(f"{SAME_COMMAND_GOES_ON} {restoration.output_dir}.") from stopped
    if PartialState().is_main_process:
        print(f"{result.folder}: {result.tokens:,} tokens")
        for name, stage in (("distil", result.distil), ("extend", result.extend)):
            if stage is not None:
                print(f"  {name}: {stage.steps} steps, {stage.seconds:.0f} seconds, loss {stage.loss:.3f} at the end")
        print(f"Serve it with transformers: {PROGRAMS['transformers'](result.folder, None)}")


def _documents(files: list[str]) -> Dataset:
    try:
        documents = load_dataset("json", data_files=files, split="train")
        require_utf8(documents)
        return documents
    except READ_ERRORS as error:
        raise unreadable(files, error) from error
