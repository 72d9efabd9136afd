"""One line patches a model for Transformers' Trainer.

Run:  python examples/other_trainers/transformers_trainer.py --model HuggingFaceTB/SmolLM2-135M
"""

import sys

from datasets import Dataset
from tiny_model import TEXT, load, parse_arguments
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from rope_patch import patch_model
from rope_patch.views import Uniform
from trl_ext.cli.user_errors import run_command


def main() -> None:
    arguments = parse_arguments(__doc__.partition("\n")[0])
    model, tokenizer = load(arguments.model)
    rows = Dataset.from_list([{"text": TEXT}] * 8).map(lambda row: tokenizer(row["text"]), remove_columns="text")

    patch_model(model, "skip", skip=Uniform(1, 4096))  # the one line

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=arguments.output_dir, max_steps=arguments.steps, logging_steps=1, report_to="none"
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    sys.exit(run_command("transformers_trainer.py", main))
