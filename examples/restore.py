"""LinearARD in one command: rescale, distil at the native length, train on at the extended one, export.

Run:  python examples/restore.py --config examples/recipes/restore/llama3_8b_pi4.yaml
      accelerate launch examples/restore.py --config RECIPE.yaml --output_dir other

Stopped, the same command goes on. The result, `OUTPUT_DIR/model`, loads everywhere without this package.
"""

import json
import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_ext import require_known_keys, restore
from trl_ext.cli.user_errors import run_command


@dataclass
class RestoreArguments:
    """What is restored, on which text, in which steps."""

    output_dir: str = field(metadata={"help": "For checkpoints, restore.json and the result."})
    rescale: str = field(metadata={"help": "Rescaling of the RoPE frequencies: pi, ntk, abf, yarn, longrope, llama3."})
    text: list[str] = field(metadata={"help": "JSON lines with long documents under `text`."})
    rescale_args: dict | str | None = field(default=None, metadata={"help": "Its options, e.g. '{\"factor\": 4.0}'."})
    distil: dict | str | None = field(default=None, metadata={"help": "RopeSFTConfig fields of stage 1 that differ."})
    extend: dict | str | None = field(default=None, metadata={"help": "RopeSFTConfig fields of stage 2 that differ."})
    skip_extension: bool = field(default=False, metadata={"help": "Stop after stage 1."})

    def __post_init__(self) -> None:
        for name in ("rescale_args", "distil", "extend"):
            value = getattr(self, name) or {}
            try:
                setattr(self, name, json.loads(value) if isinstance(value, str) else value)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name} must be a JSON object such as '{{\"factor\": 4.0}}', got {value!r}."
                ) from error


def main() -> None:
    parser = TrlParser((RestoreArguments, ModelConfig))
    require_known_keys(parser)
    parser.set_defaults(dtype=None)  # TRL's is float32, also of a base under adapters
    arguments, model = parser.parse_args_and_config()
    result = restore(
        model.model_name_or_path,
        load_dataset("json", data_files=arguments.text, split="train"),
        arguments.output_dir,
        rescale=arguments.rescale,
        rescale_args=arguments.rescale_args,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
        dtype=model.dtype,
        model_init_kwargs={"attn_implementation": model.attn_implementation, "revision": model.model_revision},
        distil=arguments.distil,
        extend=arguments.extend,
        skip_extension=arguments.skip_extension,
    )
    print(f"{result.folder}: {result.tokens} tokens, {result.distil}, {result.extend}")


if __name__ == "__main__":
    sys.exit(run_command("restore.py", main))
