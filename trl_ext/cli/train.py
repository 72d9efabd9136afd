"""`rope-patch train`: from a recipe to a trained model."""

import argparse
from typing import Any

MAIN_FIELDS = {
    "model_name_or_path": "the model: a hub id or a folder",
    "datasets": "the text, in the recipe alone: a list, for a file of yours [{path: json, data_files: train.jsonl}]",
    "dataset_name": "in place of datasets, a data set on the hub",
    "output_dir": "folder for checkpoints and the result",
    "max_length": "tokens in a row; longer documents give several rows",
    "max_steps": "optimizer steps; or num_train_epochs",
    "learning_rate": "peak of the learning rate",
    "use_peft": "train adapters (LoRA) and not all weights; with lora_r, lora_target_modules, ...",
    "rescale": "how the RoPE frequencies are stretched, e.g. yarn; with rescale_args",
    "view": "which positions a training row is read at, e.g. skip; with view_args",
    "objective": "what is minimised, e.g. self-distill",
    "resume_from_checkpoint": "a folder OUTPUT_DIR/checkpoint-N, from which a stopped run goes on",
    "stages": "in the recipe alone: a list of the keys in which each stage differs",
}


_GPUS = (1, 2, 4, 8)  # that a plan looks at where none are asked for


def add_commands(commands: Any) -> None:
    """Add `train` to the subparsers."""
    width = max(map(len, MAIN_FIELDS)) + 4
    train = commands.add_parser(
        "train",
        usage="rope-patch train RECIPE.yaml [--FIELD VALUE ...]",
        help="fine-tune as a recipe says: a YAML file, whose fields are flags too",
        description="Fine-tune as a recipe says. The recipe is a YAML file with a line `field: value` for each "
        "setting;\nevery field is a flag too, and flags win. `rope-patch train --config RECIPE.yaml` is the same.",
        epilog="The main fields:\n\n"
        + "\n".join(f"  {name:{width}}{what}" for name, what in MAIN_FIELDS.items())
        + "\n\n`rope-patch train --help-all` explains every field. `rope-patch methods` lists what rescale, view and "
        "objective can be.\nRecipes to start from are in examples/recipes.\n\n"
        "On several GPUs: --accelerate_config NAME, with ddp, fsdp2, zero2 or zero3, and fsdp2-cp or zero3-sp, whose\n"
        "GPUs share each row; or a file of accelerate's. --num_processes N takes N of the GPUs, "
        "--ranks_per_sequence N\nlets N share a row. --dry_run prints what each needs of a GPU's memory, and ends.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        forwards=True,
    )
    train.set_defaults(run=run_train, output_dir=None)


def run_train(args: argparse.Namespace) -> int:
    """Train as the recipe and the flags say; on several GPUs if asked."""
    from ..recipes.launching import Launch, quiet_other_ranks
    from ..recipes.recipe import with_config_flag

    launch, given = Launch.take(args.arguments)
    is_plan = "--dry_run" in given
    arguments = with_config_flag([argument for argument in given if argument != "--dry_run"])
    if not arguments:
        raise ValueError("name a recipe: rope-patch train RECIPE.yaml. `rope-patch train --help` says what is in one.")
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
