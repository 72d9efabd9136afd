"""The scale of two measures of research/experiments/keeping.py: what they make of a change of the weights that says nothing.

Run: python research/experiments/reply_noise.py MODEL --own chats.json [--chats 200] [--shares 0.004 0.012 ...] [--seeds 0]
         [--minutes 9] [--out FILE.jsonl]
     python research/experiments/reply_noise.py --table FILE.jsonl

Normal noise is added to each matrix of the model's layers, of --shares of the standard deviation of its weights. Such
a model's KL from the native one and its replies are measured as those of an arm: replies to users' texts of the first
--chats of --own, the native model's own chats. Share 0 is the native model.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer

from harness import Line, Run, carry_out, require, show, study_parser
from keeping import own_text_figures, served
from keeping_results import ended, reply_losses
from paired_results import SHARES, head, in_brackets
from paired_results import row as markdown_row
from rope_patch.rope.rotary import find_decoder


@torch.no_grad()
def add_noise(model: Any, share: float, seed: int) -> None:
    """Add noise to the matrices of layers, in place: normal, of `share` of the standard deviation of its weights.

    Drawn on the CPU, so that it is the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in find_decoder(model).layers.parameters():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)
            weight.copy_(weight.float() + share * weight.float().std() * noise)


def table(lines: list[Line]) -> str:
    """Markdown of KLs and replies, and how far replies are from those of share 0: paired 95 % intervals."""
    native = next(line for line in lines if not line["share"])
    written = head(["noise", "seed", "KL", "replies", "nats above share 0", "ended", "more than share 0"])
    for line in sorted(lines, key=lambda line: (line["share"], line["seed"])):
        cells = [f"{line['share']:g}", str(line["seed"]), f"{line['own']['kl']:.3f}"]
        # differences of nats have no bounds, those of shares have
        for measure, sign, bounds in ((reply_losses, -1, None), (ended, 1, SHARES)):
            ours, theirs = measure(line), measure(native)
            pairs = [sign * (a - b) for a, b in zip(ours, theirs, strict=True)]
            cells.append(f"{sign * fmean(ours):.2f}")
            cells.append(f"{fmean(pairs):+.3f} {in_brackets(pairs, bounds)}" if line["share"] else "-")
        written.append(markdown_row(cells))
    return "\n".join([*written, "", f"{len(ended(native))} replies; {native['dtype']}, {native['gpu']}."])


def run(share: float, seed: int, native: Any, tokenizer: Any, chats: list[list[int]], path: str) -> Iterator[Line]:
    """Measure the model with noise of one share and seed."""
    model = served(path)
    if share:
        add_noise(model, share, seed)
    yield {
        "dtype": str(model.dtype).removeprefix("torch."),
        "own": own_text_figures(model, native, tokenizer, chats),
    }


def main() -> None:
    parser = study_parser(__doc__, "reply_noise.jsonl")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--own", type=Path, help="chats of the native model, see keeping.py")
    parser.add_argument("--chats", type=int, default=200, help="how many of them, from the first on")
    parser.add_argument("--shares", type=share_above_0, nargs="+", default=[0.004, 0.012, 0.026, 0.045])
    args = parser.parse_args()
    if args.table:
        show(args, table, None)
        return
    require(parser, args, "model", "own")
    tokenizer, native = AutoTokenizer.from_pretrained(args.model), served(args.model)
    if not tokenizer.chat_template:
        parser.error("the model's tokenizer has no chat template: replies are those of an instruct model")
    chats = json.loads(args.own.read_text())[: args.chats]
    runs = [
        Run(
            f"noise {share:g}, seed {seed}",
            {"share": share, "seed": seed, "chats": len(chats)},
            partial(run, share, seed, native, tokenizer, chats, args.model),
            {},
        )
        for seed, share in itertools.product(args.seeds, [0.0, *args.shares])
        if share or seed == args.seeds[0]
    ]
    carry_out(runs, args, lambda line: f"KL {line['own']['kl']:.4f}, replies {-fmean(reply_losses(line)):.3f}")


def share_above_0(text: str) -> float:
    """A number of --shares."""
    share = float(text)
    if not 0 < share < float("inf"):
        raise argparse.ArgumentTypeError("shares must be above 0: share 0, the native model, is always there")
    return share


if __name__ == "__main__":
    main()
