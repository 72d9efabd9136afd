"""PosAug from scratch at 10.6M parameters: what each law, range and layer choice does to the cliff beyond the window.

Run: python research/experiments/token_text.py TOKENS --train books.jsonl.xz ... --val held-out.jsonl.xz --vocabulary 16384
     python research/experiments/posaug_from_scratch.py TOKENS [--tokens 5e8] [--mix 0.5] [--exams 104] [--arms NAME ...]
         [--seeds 42 137 2024] [--out FILE.jsonl] [--checkpoints FOLDER] [--minutes 8.5] [--part K/N]
     python research/experiments/posaug_from_scratch.py --table FILE.jsonl ...

The paper's recipe (its 10.6M row): 384 wide, 6 layers of 6 heads of 64, SwiGLU of 1024, RMSNorm, tied embeddings,
RoPE base 1e4, window 2048, 128 rows a step, AdamW (0.9, 0.95), weight decay 0.1 on matrices, gradients clipped at 1,
cosine 6e-4 to 6e-5, warmup of 500 / 1907 of the steps, bf16 autocast. Ours: a byte-level BPE of 16384 entries from the
texts, in place of the paper's 50257, so that the head costs less than the layers do (embeddings are not among the
10.6M); losses therefore compare between arms, not with the paper's. Arms of a seed have the same weights at the start
and read the same rows in the same order; each epoch cuts and orders the text anew. All go through `patch_model`, the
baseline with view="standard". Layers are compiled and views drawn outside of them: every arm runs the same kernels.

Text alone leaves context beyond 512 tokens unused. With --mix a share of the rows of each step are exams (exams.py):
--keys look-alikes anywhere in the row, all of which are asked at its end; of these rows the answers alone count. With 4
keys in half of the rows a baseline finds nearly all of them; with 16 in a quarter none had begun to after 950 steps
(research/results/posaug-exams-tried-h200.jsonl).

Some arms (posaug_arms.py) start from the weights that another one ended with, which are in --checkpoints: those that
train a finished baseline on for --retrofit of its steps, the whole recipe anew with its warmup and cosine, and those
that are read under YaRN, whose factor is the length that is read over the window.

Measured at true positions on 20 spans of 16384 tokens, one a book: cliff, loss within the window, exact context gain,
and the gain in both of its forms with chunks of --chunks tokens; with --exams so many exams at each of --lengths, of
which --questions keys are asked, teacher-forced. One JSON line an arm and seed is added to --out, with the figures of
each span and the mark of each answer, and what is in it is not done again. With --checkpoints a run that --minutes cuts
off goes on, with the same draws and rows: what it had measured is in OUT.parts.jsonl. --part shares the runs among
processes, on one GPU or several (CUDA_VISIBLE_DEVICES); where arms start from others, give each process seeds of its
own instead. --table prints means over seeds, intervals, and which of the paper's orderings hold.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from exams import KINDS, Exam, marks, sitting
from harness import DEVICE, Line, Run, autocast, carry_out, chosen, load, require, show, study_parser
from posaug_arms import Arm, arms
from posaug_results import tables
from posaug_training import Training, drawn_model
from result_parts import Parts
from rope_patch import patch_model
from rope_patch.eval import LossByPosition, context_gain, loss_by_position
from token_text import first_rows, read_facts, read_stream


@dataclass(frozen=True)
class Data:
    """What all arms share.

    Args:
        stream: ids of the text to train on.
        val: spans to measure on, [spans, length].
        vocabulary: entries.
        tokenizer: for exams; None where there are none.
        exams: that are measured, of each kind and length.
    """

    stream: torch.Tensor
    val: torch.Tensor
    vocabulary: int
    tokenizer: Any
    exams: dict[tuple[str, int], list[Exam]]


def read_data(args: argparse.Namespace) -> Data:
    """Text of the folder, and exams in its held-out part.

    Raises:
        ValueError: ids of the folder have 32 bits.
    """
    vocabulary = read_facts(args.folder)["vocabulary"]
    if vocabulary > 2**16:
        raise ValueError(f"the vocabulary of {args.folder} must have at most 65536 entries, got {vocabulary}.")
    stream = torch.from_numpy(read_stream(args.folder, "train").view("<i2").copy())
    val = torch.from_numpy(first_rows(args.folder, "val", args.length, args.spans))
    tokenizer, exams = None, {}
    if args.mix or args.exams:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes that make exams are forked
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.folder / "tokenizer.json"))
    if args.exams:
        exams = {
            (kind, n): sitting(kind, tokenizer, val.flatten().tolist(), n, args.exams, args.keys, args.questions)
            for kind, n in itertools.product(args.kinds, args.lengths)
        }
    return Data(stream, val, vocabulary, tokenizer, exams)


def checkpoint(name: str, seed: int, args: argparse.Namespace) -> Path | None:
    """Where the finished weights of an arm are kept."""
    return None if args.checkpoints is None else args.checkpoints / f"{name.replace('/', ' by ')}-{seed}"


def finished(name: str, seed: int, args: argparse.Namespace) -> Any:
    """The model of an arm that another one starts from.

    Raises:
        ValueError: it is not in --checkpoints.
    """
    folder = checkpoint(name, seed, args)
    if folder is None or not folder.is_dir():
        raise ValueError(f"arm {name!r}, seed {seed}, is to be in --checkpoints first: got no folder {folder}.")
    return load(folder)


def trained(name: str, arm: Arm, seed: int, data: Data, args: argparse.Namespace, parts: Parts) -> Any:
    """The model of an arm, with what is known of its training in `parts`; None where time was up."""
    folder = checkpoint(name, seed, args)
    if folder is not None and folder.is_dir() and "training" in parts.known:
        return load(folder)
    start = (
        drawn_model(seed, data.vocabulary, args).to(DEVICE) if arm.after is None else finished(arm.after, seed, args)
    )
    file = None if folder is None else folder.with_name(f"{folder.name}.pt")
    training = Training(start, arm, seed, args, data.stream, data.tokenizer, file)
    if not training.train(args.deadline):
        print(f"{name:16} seed {seed:5}  at step {training.step} of {training.steps} when time was up", flush=True)
        return None
    parts.begin()
    model = training.end()
    if folder is not None:
        model.save_pretrained(folder)
    parts.get("training", training.figures)
    if file is not None:
        file.unlink(missing_ok=True)
    return model


def measures(model: Any, yarn: bool, data: Data, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """What finds each part of the figures, by name."""

    def at(length: int, find: Callable[..., Any], *more: Any) -> Any:
        if yarn:
            patch_model(model, "yarn", factor=max(length / args.window, 1.0))
        with autocast(model):
            return find(model, *more)

    short = min(512, args.window // 4)
    return {
        "loss": partial(at, args.length, losses, data.val, args.window, short),
        **{f"gain {chunk}": partial(at, args.length, gains, data.val, short, chunk) for chunk in args.chunks},
        **{f"{kind} {n}": partial(at, n, marks, sat) for (kind, n), sat in data.exams.items()},
    }


def losses(model: Any, val: torch.Tensor, window: int, short: int) -> Line:
    """Loss and exact gain by position over all spans, and the loss of each span within the window and beyond it."""
    of_spans = [loss_by_position(model, span[None], progress=False) for span in val]
    curve = LossByPosition(torch.stack([span.loss for span in of_spans]).mean(0), len(val), of_spans[0].window)
    gain = context_gain(model, val, short=short, batch_size=32, progress=False)
    ends = [window * k // 4 + 1 for k in (1, 2, 4, 6, 8, 12, 16, 24)]
    edges = [64, *(e for e in ends if 64 < e < curve.seq_len), curve.seq_len]
    return {
        "in_window": curve.in_window(window),
        "cliff": curve.cliff(window),
        "gain": gain.total,
        "loss_by_position": curve.bins(edges),
        "gain_by_position": gain.table(),
        "of_spans": [{"in_window": c.in_window(window), "beyond": c.mean(window + 1, c.seq_len)} for c in of_spans],
    }


def gains(model: Any, val: torch.Tensor, short: int, chunk: int) -> Line:
    """The context gain of each span in both forms, with chunks of so many tokens."""
    found = [
        context_gain(model, span[None], kind="paper", short=short, stride=chunk, batch_size=32, progress=False)
        for span in val
    ]
    return {"chunk": chunk, "exact": [g.exact for g in found], "paper": [g.total for g in found]}


def results(name: str, seed: int, data: Data, args: argparse.Namespace) -> Iterator[Line]:
    """Train and measure one arm, as far as there is time."""
    arm = arms(args.window, args.retrofit)[name]
    parts = Parts(args.out.with_suffix(".parts.jsonl") if args.checkpoints else None, {"arm": name, "seed": seed})
    if not args.deadline.leaves(0):
        print(f"{name:16} seed {seed:5}  not begun: time was up", flush=True)
        return
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if arm.yarn:
        assert arm.after is not None
        model = finished(arm.after, seed, args)
        parts.get("training", lambda: {"view": ["standard", {}], "after": arm.after, "tokens": 0, "log": []})
    else:
        model = trained(name, arm, seed, data, args, parts)
    if model is None:
        return
    for part, find in measures(model, arm.yarn, data, args).items():
        if part not in parts.known and args.checkpoints and not args.deadline.leaves(0):
            print(f"{name:16} seed {seed:5}  measured up to {part!r} when time was up", flush=True)
            return
        parts.get(part, find)
    yield {
        **parts.known["training"],
        "yarn": arm.yarn,
        "parameters": sum(p.numel() for p in model.model.layers.parameters()),
        "vocabulary": data.vocabulary,
        "window": args.window,
        "spans": list(data.val.shape),
        "keys": args.keys,
        **parts.known["loss"],
        "gains": [parts.known[f"gain {chunk}"] for chunk in args.chunks],
        "exams": [
            {"kind": kind, "length": n, "yarn": 1, "marks": parts.known[f"{kind} {n}"]} for kind, n in data.exams
        ],
    }


def main() -> None:
    parser = study_parser(__doc__, "posaug_from_scratch.jsonl", seeds=(42, 137, 2024))
    parser.add_argument("folder", nargs="?", type=Path, help="of token files")
    parser.add_argument("--tokens", type=float, default=2e8, help="that each arm is trained on; the paper has 5e8")
    parser.add_argument(
        "--retrofit", type=float, default=0.1, help="steps of a baseline that is trained on, of its own"
    )
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps what is trained, as ARM-SEED")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=128, help="rows of a step")
    parser.add_argument("--micro-batch", type=int, default=64, help="rows of a forward")
    parser.add_argument("--mix", type=float, default=0.0, help="share of the rows of a step that are exams")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["multikey"], help="of exams")
    parser.add_argument("--keys", type=int, default=4, help="look-alike keys of an exam")
    parser.add_argument("--workers", type=int, default=4, help="processes that make the exams of the next steps")
    parser.add_argument("--exams", type=int, default=0, help="of each kind and length that are measured")
    parser.add_argument("--questions", type=int, default=8, help="of an exam that is measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="of exams")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 512, 1024], help="tokens, of the gain's forms")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a span that is measured")
    parser.add_argument("--spans", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--override", type=json.loads, default={}, help="fields of LlamaConfig, as JSON")
    parser.add_argument("--log-steps", type=int, default=50)
    args = parser.parse_args()
    if args.table:
        show(args, tables, None)
        return
    require(parser, args, "folder")
    if args.batch % args.micro_batch:
        parser.error(f"--micro-batch must divide --batch={args.batch}, got {args.micro_batch}")
    known = arms(args.window, args.retrofit)
    names = chosen(parser, args, known, [name for name, arm in known.items() if arm.after is None])
    if args.checkpoints is None and (starting := [name for name in names if known[name].after is not None]):
        parser.error(f"arms {', '.join(starting)} start from others, which are to be in --checkpoints")
    torch.set_float32_matmul_precision("high")
    data = read_data(args)
    # seeds outermost: what a slice leaves undone is a whole comparison less, not an arm
    runs = [
        Run(f"{name:16} seed {seed:5}", {"arm": name, "seed": seed}, partial(results, name, seed, data, args))
        for seed, name in itertools.product(args.seeds, names)
    ]
    carry_out(runs, args, shown)


def shown(line: Line) -> str:
    """A line of the file in one of the terminal."""
    found = [f"in window {line['in_window']:.3f}  cliff {line['cliff']:.3f}  G {line['gain']:.3f}"]
    found += [f"{c['kind']} {c['length']} {fmean(r for e in c['marks'] for _, r in e):.2f}" for c in line["exams"]]
    rate = line.get("tokens_per_second")
    return "  ".join([*found, *([f"{rate:,.0f} tokens/s  {line['peak_gib']:.1f} GiB"] if rate else [])])


if __name__ == "__main__":
    main()
