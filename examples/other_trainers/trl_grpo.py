"""One line patches a model for TRL's GRPOTrainer; replies are sampled at true positions and then read under the view.

Run:  python examples/other_trainers/trl_grpo.py --model HuggingFaceTB/SmolLM2-135M
"""

import sys

import torch
from datasets import Dataset
from tiny_model import TEXT, load, parse_arguments
from trl import GRPOConfig, GRPOTrainer

from rope_patch import patch_model
from rope_patch.views import Uniform
from trl_ext.cli.user_errors import run_command


def reward(completions: list[str], **_: object) -> list[float]:
    """As many different words as a reply has."""
    return [float(len(set(reply.split()))) for reply in completions]


def main() -> None:
    arguments = parse_arguments(__doc__.partition("\n")[0])
    model, tokenizer = load(arguments.model)

    patch_model(model, "skip", skip=Uniform(1, 4096))  # the one line

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            max_completion_length=16,  # tokens of a reply
            logging_steps=1,
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": TEXT}] * 8),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    sys.exit(run_command("trl_grpo.py", main))
