"""One line patches a model for a LightningModule.

Run:  pip install lightning; python examples/other_trainers/lightning_loop.py --model HuggingFaceTB/SmolLM2-135M
"""

import sys

import torch
from lightning import LightningModule, Trainer
from tiny_model import TEXT, load, parse_arguments

from rope_patch import patch_model
from rope_patch.views import Uniform
from trl_ext.cli.user_errors import run_command


class Tuned(LightningModule):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        # or: self_distillation_loss(self.model, batch, view=..., step=self.global_step) on a model without the line
        return self.model(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    arguments = parse_arguments(__doc__.partition("\n")[0])
    model, tokenizer = load(arguments.model)

    patch_model(model, "skip", skip=Uniform(1, 4096))  # the one line

    rows = [{"input_ids": tokenizer(TEXT, return_tensors="pt")["input_ids"][0]}] * 8
    trainer = Trainer(
        max_steps=arguments.steps, accelerator="auto", devices=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Tuned(model.train()), torch.utils.data.DataLoader(rows, batch_size=2))
    model.save_pretrained(arguments.output_dir)
    tokenizer.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    sys.exit(run_command("lightning_loop.py", main))
