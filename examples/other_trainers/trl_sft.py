"""One line patches a model for TRL's own SFTTrainer.

Run:  python examples/other_trainers/trl_sft.py --model HuggingFaceTB/SmolLM2-135M

`trl_ext.RopeSFTTrainer` takes SFTTrainer's place and also has the objectives of this package.
"""

import sys

import torch
from datasets import Dataset
from tiny_model import TEXT, load, parse_arguments
from trl import SFTConfig, SFTTrainer

from rope_patch import patch_model
from rope_patch.views import Uniform
from trl_ext.cli.user_errors import run_command


def main() -> None:
    arguments = parse_arguments(__doc__.partition("\n")[0])
    model, tokenizer = load(arguments.model)

    patch_model(model, "skip", skip=Uniform(1, 4096))  # the one line

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            logging_steps=1,
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"text": TEXT}] * 8),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    sys.exit(run_command("trl_sft.py", main))
