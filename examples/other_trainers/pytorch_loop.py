"""One line patches a model for a training loop of your own, in plain PyTorch.

Run:  python examples/other_trainers/pytorch_loop.py --model HuggingFaceTB/SmolLM2-135M
"""

import sys

import torch
from tiny_model import TEXT, load, parse_arguments

from rope_patch import describe, patch_model, unpatch_model
from rope_patch.views import Uniform
from trl_ext.cli.user_errors import run_command


def main() -> None:
    arguments = parse_arguments(__doc__.partition("\n")[0])
    model, tokenizer = load(arguments.model)

    patch_model(model, "skip", skip=Uniform(1, 4096))  # the one line

    print(describe(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = tokenizer([TEXT], return_tensors="pt")["input_ids"]
    for step in range(arguments.steps):
        model.train()  # a view acts in training mode alone, by default
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.3f}")
    unpatch_model(model).save_pretrained(arguments.output_dir)  # a plain checkpoint
    tokenizer.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    sys.exit(run_command("pytorch_loop.py", main))
