"""RPSD in its paper's regime: rows of four windows with answers anywhere in them, then read up to four times as far.

Run: python research/experiments/rpsd_far.py MODEL --text BOOKS ... --held-out BOOKS ... [--taught FOLDER] [--bench FOLDER]
         [--arms NAME ...] [--seeds 0 1 2] [--minutes 9] [--part K/N] [--out FILE.jsonl]
     python research/experiments/rpsd_far.py --table FILE.jsonl ... [--arms NAME ...]

A small model retrieves too badly to show anything, so it is taught first, in its window: steps of text in turn with
steps of exams (see `exams`), a model a seed, into --taught-SEED. Every arm (rpsd_far_arms.py) extends it with ABF by
the same tokens in rows of --row, of which a share of --mix is an exam of the whole row: --keys look-alikes and repeated
keys, anywhere in it, and questions at its end.

With --matched noise and dropout are as strong as the skip: their KL before training, of the taught model of the first
seed, is the skip's in the same rows (rpsd_far_match.py).

Measured of the checkpoint in bf16, exams teacher-forced: within the window, at the row's length, and under YaRN on top
of ABF at --factors times that; loss by position at the row's length and at the farthest; attention distance;
short-text benchmarks, if --bench names a folder with them. A seed draws lessons, rows and views; exams are the same.
One JSON line an arm and seed is added to --out, with every answer's mark. A run that is cut off goes on: what it had
measured is in OUT.parts.jsonl, and what it trained in --checkpoints, where that is given.
"""

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from exams import KINDS, Exam, Kind, exam_over, marks, sitting
from harness import (
    DEVICE,
    Line,
    Run,
    add_training_arguments,
    carry_out,
    chosen,
    fields_but,
    load,
    logged,
    require,
    short_texts_at_once,
    show,
    study_parser,
)
from harness import train as train_in_place
from result_parts import Parts
from rope_patch import patch_model
from rope_patch.eval import attention_distance, loss_by_position, read_texts, text_rows
from rope_patch.eval.measures.harness import require_lm_eval
from rope_patch.layout.special_tokens import SpecialTokens, cut_document
from rpsd_far_arms import Arm, arms
from rpsd_far_match import matched, mean_kl
from rpsd_far_results import summary, tables
from rpsd_small_scale import TEACH, lessons
from trl_ext.runs.folder import write_whole

QUESTIONS = 24  # of an exam
FIELDS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "logging_steps": 4,
    "logging_first_step": True,
}


@dataclass(frozen=True)
class Data:
    """What all runs share."""

    tokenizer: Any
    documents: list[str]
    val: torch.Tensor
    exams: dict[tuple[int, int, Kind], list[Exam]]

    @cached_property
    def ids(self) -> list[list[int]]:
        """Tokens of `documents`, once for all runs: millions of tokens take longer than an arm's training."""
        ids: list[list[int]] = self.tokenizer(self.documents, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def special(self) -> SpecialTokens:
        """What rows begin with, as the tokenizer begins a text."""
        return SpecialTokens.of(self.tokenizer)


def rows_of(data: Data, args: argparse.Namespace, seed: int) -> Dataset:
    """Rows of --row tokens of one document each, a share of --mix of which is an exam over the whole row."""
    rng, rows, begin = random.Random(seed), [], data.special.begin
    pieces = [piece for d in data.ids for piece in cut_document(d, args.row, data.special, keep_rest=False)]
    for piece in rng.sample(pieces, len(pieces)):
        if rng.random() < args.mix:
            text = piece[len(begin) :]
            piece = exam_over(rng.choice(KINDS), data.tokenizer, text, args.keys, rng, QUESTIONS, begin).ids
        rows.append({"input_ids": piece})
    return Dataset.from_list(rows)


def sittings(tokenizer: Any, val: torch.Tensor, args: argparse.Namespace) -> dict[tuple[int, int, Kind], list[Exam]]:
    """The exams of each factor of YaRN, length and kind, which all models sit."""
    begin = SpecialTokens.of(tokenizer).begin
    haystack = val[:, len(begin) :].flatten().tolist()
    lengths = [(1, args.window), *((factor, factor * args.row) for factor in args.factors)]
    return {
        (factor, length, kind): sitting(kind, tokenizer, haystack, length, args.exams, args.keys, QUESTIONS, begin)
        for (factor, length), kind in itertools.product(lengths, KINDS)
    }


def arms_of(args: argparse.Namespace) -> dict[str, Arm]:
    """Every arm by name, with noise and dropout as strong as --matched has it."""
    known = args.matched is not None and args.matched.is_file()
    return arms(args.row, **json.loads(args.matched.read_text())["strengths"] if known else {})


def match(args: argparse.Namespace, data: Data) -> None:
    """Find strengths of noise and dropout for --matched, at the taught model of the first seed."""
    base, seed = taught(args, data, args.seeds[0]), args.seeds[0]
    rows = rows_of(data, args, seed)

    def kl(arm: Arm, steps: int) -> float:
        still = argparse.Namespace(**{**vars(args), "steps": steps, "learning_rate": 0.0})
        with tempfile.TemporaryDirectory() as scratch:
            return mean_kl(extend(arm, base, rows, data.tokenizer, still, seed, Path(scratch))["log"])

    write_whole(args.matched, matched(kl, args.row, args.steps))  # other processes wait for the file


def taught(args: argparse.Namespace, data: Data, seed: int) -> Path:
    """The model of a seed that retrieves in its window; it is taught if it is not there."""
    folder = args.taught.with_name(f"{args.taught.name}-{seed}")
    if not (folder / "config.json").is_file():
        lesson = argparse.Namespace(short=args.window, spacing=args.window // args.keys, teach=args.teach)
        fields = {**FIELDS, "max_length": args.window, **TEACH, "gradient_checkpointing": True, "max_steps": 200}
        rows = lessons(data.documents, data.tokenizer, lesson, seed)
        trainer = train_in_place(load(args.model), data.tokenizer, rows, {**fields, **args.teach}, seed)
        print(logged(trainer, "step", "loss"), flush=True)
        trainer.model.save_pretrained(folder)
        data.tokenizer.save_pretrained(folder)
    return folder


def extend(
    arm: Arm, base: Path, rows: Dataset, tokenizer: Any, args: argparse.Namespace, seed: int, folder: Path
) -> Line:
    """Extend a taught model with ABF into `folder`; what its training logged."""
    model = load(base, arm.attention)
    abf = {"theta": args.theta, "max_position_embeddings": args.row}
    if arm.fields is None:
        patch_model(model, "abf", **abf)
        model.save_pretrained(folder)
        return {"train_seconds": 0.0, "log": []}
    of_all = {
        "rescale": "abf",
        "rescale_args": abf,
        "max_length": args.row,
        "max_steps": round(arm.steps * args.steps),
        "gradient_accumulation_steps": args.rows,
        "learning_rate": args.learning_rate,
        "warmup_steps": 0.05,
    }
    fields = {**FIELDS, **of_all, **args.override, **arm.fields}
    trainer = train_in_place(model, tokenizer, rows, fields, seed, args.compile)
    trainer.save_model(str(folder))
    return {
        "train_seconds": trainer.state.log_history[-1]["train_runtime"],
        "log": logged(trainer, "step", "loss", "ce", "kl", "tokens_per_second"),
    }


def measure(folder: Path, data: Data, args: argparse.Namespace, parts: Parts) -> Line:
    """Everything that is measured of a checkpoint, but for what `parts` has."""
    figures: Line = {"exams": []}
    for factor in args.factors:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if DEVICE == "cuda" else None)
        model.to(DEVICE).eval()
        if factor > 1:
            patch_model(model, "yarn", factor=float(factor))
        for (of_factor, length, kind), sat in data.exams.items():
            if of_factor == factor:
                graded = parts.get(f"{kind} {length} x{factor}", partial(marks, model, sat))
                figures["exams"].append({"kind": kind, "length": length, "yarn": factor, "marks": graded})
        if factor in (1, max(args.factors)):
            rows = data.val[: args.val_rows, : factor * args.row]
            figures[f"loss x{factor}"] = parts.get(f"loss x{factor}", partial(losses, model, rows, args))
        if factor == 1:
            figures["attention"] = parts.get("attention", partial(attention, model, data.val[:1, : args.row]))
            if args.bench:
                figures["short_text"] = parts.get("short_text", partial(short_text_of, model, data.tokenizer, args))
    return figures


def losses(model: Any, rows: torch.Tensor, args: argparse.Namespace) -> list[dict[str, float]]:
    """Mean loss between multiples of the window and of the row."""
    curve = loss_by_position(model, rows, progress=False)
    edges = {e for e in (64, args.window, args.row, 2 * args.row) if e < curve.seq_len}
    bins: list[dict[str, float]] = curve.bins(sorted({*edges, curve.seq_len}))
    return bins


def attention(model: Any, rows: torch.Tensor) -> Line:
    """Mean attention of the last queries by distance, over layers and heads."""
    found = attention_distance(model, rows, progress=False)
    mass = torch.tensor(found.mass).mean(0)
    return {"edges": found.edges, "mass": [round(value, 6) for value in mass.tolist()]}


def short_text_of(model: Any, tokenizer: Any, args: argparse.Namespace) -> Line:
    """Accuracy over short benchmarks, sample by sample."""
    from rope_patch.eval import short_text

    found = short_text(model, tokenizer, data=args.bench, limit=args.bench_limit, batch_size=short_texts_at_once(model))
    return {"accuracy": found.accuracy, "scores": found.scores}


def run(name: str, seed: int, data: Data, args: argparse.Namespace) -> Iterator[Line]:
    """Teach, extend and measure one arm."""
    base, arm = taught(args, data, seed), arms_of(args)[name]
    key = {"arm": name, "seed": seed}
    parts = Parts(args.out.with_suffix(".parts.jsonl") if args.checkpoints else None, key)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.checkpoints or scratch) / f"{name}-{seed}".replace("/", " by ")
        if "training" not in parts.known or not folder.is_dir():
            parts.begin()
            rows = rows_of(data, args, seed)
            parts.get("training", lambda: extend(arm, base, rows, data.tokenizer, args, seed, folder))
        yield {"strength": arm.strength, **parts.known["training"], **measure(folder, data, args, parts)}


def main() -> None:
    parser = study_parser(__doc__, "rpsd_far.jsonl", seeds=(0, 1, 2))
    add_training_arguments(parser)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", nargs="+", help="JSON lines with `text`: documents to train on")
    parser.add_argument("--held-out", nargs="+", help="JSON lines with `text`: documents to measure on")
    parser.add_argument("--taught", type=Path, default=Path("taught"), help="folders of taught models, with -SEED")
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps what is trained, as ARM-SEED")
    parser.add_argument("--teach", type=fields_but(), default={}, help="RopeSFTConfig fields of teaching, as JSON")
    parser.add_argument("--window", type=int, default=8192, help="tokens of the window that retrieval is taught in")
    parser.add_argument("--row", type=int, default=32768, help="tokens of a row that arms are trained on")
    parser.add_argument("--mix", type=float, default=0.5, help="share of rows that are exams")
    parser.add_argument("--keys", type=int, default=68, help="look-alike keys of an exam")
    parser.add_argument("--steps", type=int, default=64, help="of each arm")
    parser.add_argument("--rows", type=int, default=1, help="of a step of each arm")
    parser.add_argument("--theta", type=float, default=8e5, help="base of ABF")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--matched", type=Path, help="file of strengths; found if it is not there")
    parser.add_argument("--exams", type=int, default=24, help="of each kind and length")
    parser.add_argument(
        "--factors", type=int, nargs="+", default=[1, 2, 4], help="of YaRN on top of ABF; 1, ABF alone, is needed"
    )
    parser.add_argument("--val-rows", type=int, default=3)
    parser.add_argument(
        "--bench", type=Path, help="folder with short-text benchmarks, see rope_patch.eval.measures.short_text"
    )
    parser.add_argument("--bench-limit", type=int, default=200, help="samples of each benchmark")
    args = parser.parse_args()
    if args.table:
        show(args, tables, None)
        return
    require(parser, args, "model", "text", "held_out")
    if 1 not in args.factors:
        parser.error("--factors needs 1: attention and short text are measured under ABF alone")
    if args.bench:  # what is lacking is told before training
        require_lm_eval()
    names = chosen(parser, args, arms(args.row))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    documents = list(read_texts(args.text))
    farthest = max(args.factors) * args.row
    val = text_rows(tokenizer, read_texts(args.held_out), seq_len=farthest, n_rows=args.val_rows)
    data = Data(tokenizer, documents, val, sittings(tokenizer, val, args))
    if args.matched is not None and not args.matched.is_file() and {"noise", "dropout"} & set(names):
        match(args, data)
    runs = [
        Run(
            f"{name}, seed {seed}",
            {"arm": name, "seed": seed},
            partial(run, name, seed, data, args),
            {"arm": name},
        )
        for seed, name in itertools.product(args.seeds, names)
    ]
    carry_out(runs, args, summary)


if __name__ == "__main__":
    main()
