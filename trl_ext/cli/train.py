"""`rope-patch train`: from a recipe to a trained model."""

import argparse
from typing import Any

from ..demo.settings import FOLDER as DEMO_FOLDER

MAIN_FIELDS = {
    "model_name_or_path": "the model: a hub id or a folder",
    "datasets": "the text, only in a recipe: a list, for your own file [{path: json, data_files: train.jsonl}]",
    "dataset_name": "a data set on the hub, in place of datasets",
    "output_dir": "folder for checkpoints and the result",
    "max_length": "tokens in a sequence; longer documents give several",
    "max_steps": "optimizer steps; or num_train_epochs",
    "learning_rate": "peak learning rate",
    "use_peft": "train adapters (LoRA) instead of all weights; with lora_r, lora_target_modules, ...",
    "rescale": "RoPE scaling, e.g. yarn; with rescale_args",
    "view": "position IDs of a training sequence, e.g. skip; with view_args",
    "objective": "training loss, e.g. self-distill",
    "resume_from_checkpoint": "a folder OUTPUT_DIR/checkpoint-N, from which a stopped run is resumed",
    "stages": "only in a recipe: a list of stages, each with the keys in which it differs",
}

_DESCRIPTION = """\
Fine-tune by a recipe, a YAML file with a line `field: value` for each setting. Every field is also a flag: max_steps
is --max-steps. Flags win. `rope-patch train --config RECIPE.yaml` is the same.

--model MODEL and --data FILE ... train by a recipe on a model and a text of yours: files of one JSON object a line,
such as {"text": ...}. --demo takes the small model and the texts of `rope-patch demo`, which are installed."""
_MORE = """\
`rope-patch train --help-all` explains every field. `rope-patch methods` lists the values of rescale, view and
objective. Recipes to start from are in examples/recipes.

On several GPUs: --accelerate-config NAME, with ddp, fsdp2, zero2 or zero3, or with fsdp2-cp or zero3-sp, whose GPUs
share each sequence; or a config file of accelerate. --num-processes N sets the number of GPUs, and
--ranks-per-sequence N how many share a sequence. --dry-run prints the memory that each needs, and exits."""
_GPUS = (1, 2, 4, 8)  # numbers that a dry run looks at by default


def add_commands(commands: Any) -> None:
    """Add `train` to the subparsers."""
    width = max(map(len, MAIN_FIELDS)) + 4
    fields = "\n".join(f"  {name:{width}}{what}" for name, what in MAIN_FIELDS.items())
    train = commands.add_parser(
        "train",
        usage="rope-patch train RECIPE.yaml [--model MODEL] [--data FILE ...] [--FIELD VALUE ...]",
        help="fine-tune by a recipe: a YAML file, whose fields are flags too",
        description=_DESCRIPTION,
        epilog=f"The main fields:\n\n{fields}\n\n{_MORE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        forwards=True,
    )
    train.set_defaults(run=run_train, output_dir=None)


def run_train(args: argparse.Namespace) -> int:
    """Train by a recipe and flags, with --accelerate-config on several GPUs."""
    from ..recipes.launching import Launch, quiet_other_ranks
    from ..recipes.recipe import with_config_flag

    launch, given = Launch.take(args.arguments)
    is_plan = "--dry-run" in given
    arguments = with_config_flag([argument for argument in given if argument not in ("--dry-run", "--demo")])
    if not arguments:
        raise ValueError("name a recipe: rope-patch train RECIPE.yaml. `rope-patch train --help` explains its fields.")
    if "--demo" in given:
        from ..demo.files import write_files

        model, texts = write_files(DEMO_FOLDER)
        arguments += ["--model", str(model), "--data", str(texts)]
    if is_plan:
        from ..recipes.fine_tuning import plan_recipe

        if launch is None:
            import torch

            print(plan_recipe(arguments, _GPUS, available=torch.cuda.device_count()))
        else:
            print(plan_recipe(arguments, [launch.settings()["num_processes"]], launch.ranks_per_sequence))
        return 0
    if launch is not None:
        return launch.run(["train", *arguments])
    quiet_other_ranks()
    from ..recipes.fine_tuning import fine_tune_recipe

    fine_tune_recipe(arguments)
    return 0
