"""One line patches a model for TRL's DPOTrainer; policy and reference read each pair at the same positions.

The reference is the model without its adapters. docs/other_trainers.md says what holds for a `ref_model` of its own.

Run:  python examples/other_trainers/trl_dpo.py --model HuggingFaceTB/SmolLM2-135M
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_model import TEXT, load, parse_arguments
from trl import DPOConfig, DPOTrainer

from rope_patch import patch_model
from rope_patch.views import Uniform
from trl_ext.cli.user_errors import run_command

PAIR = {"prompt": TEXT, "chosen": " and was read all the same", "rejected": " a word a word a word"}


def main() -> None:
    arguments = parse_arguments(__doc__.partition("\n")[0])
    model, tokenizer = load(arguments.model)

    patch_model(model, "skip", skip=Uniform(1, 4096))  # the one line

    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            logging_steps=1,
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Dataset.from_list([PAIR] * 8),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    sys.exit(run_command("trl_dpo.py", main))
