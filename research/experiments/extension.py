"""A real model from 8K to 32K and 64K: methods that train in short windows beside full length, at equal tokens.

Run: python research/experiments/token_text.py TOKENS --train books.jsonl.xz ... --val held-out.jsonl.xz --tokenizer MODEL
         --tokens 12000000 --val-documents 8 --val-length 65536
     python research/experiments/extension.py MODEL TOKENS [--targets 65536 32768] [--schedules pi yarn] [--arms NAME ...]
         [--seeds 0 1 2] [--short-data FOLDER --limit 200] [--out FILE.jsonl] [--minutes 9] [--part K/N]
     python research/experiments/extension.py MODEL TOKENS --cost 6 [...]
     python research/experiments/extension.py --table FILE.jsonl ... [--plot FIGURE.png]

Every run rescales the model by target / window, under PI or YaRN, and trains all weights with RopeSFTTrainer on
--tokens tokens, --step-tokens in each step, in bf16 autocast with gradient checkpointing: all methods at one learning
rate, on rows cut from the same documents. A cue counts as tokens, and of PoSE those of the window. `none` is the
rescaled model without training, `native` the model as it is. --arms also takes the forms of skip distillation and
the combinations of methods, which are left out by default. Measured: loss by position; passkey by length up to the
target, as the model writes it; passkey and one of four needles in held-out text with the digits of the answer
teacher-forced; short text through lm-eval where there is --short-data. One JSON line a run is added to --out, and what
is in it is not done again. Seeds are outermost, so a slice leaves whole comparisons. --minutes begins no run that would
not be through by then, as far as runs in --out tell, those of the same method if there are any; --part shares the runs
among processes, on one GPU or several (CUDA_VISIBLE_DEVICES).

--prompts asks passkeys and keyed numbers among look-alikes, which the model answers as it writes; every prompt's score
is in the lines, and --table has differences from "b=0" with intervals, and keyed numbers by their distance. --rates
trains every method at each rate; --best takes the rate of such a file with the least "choice", the loss up to the
target on --choosing-rows held-out rows of which nothing else is reported. With --checkpoints a run that is cut off goes
on, within its training and its measures.

--cost trains every method for that many steps after two that warm up, measures nothing else, and is for a GPU without
other work: seconds and peak memory, first with one row at a time and then with as many as make --at-once tokens. The
methods take turns in each seed's round.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from exams import NEEDLES, Exam, Needle, accuracy, needle_exam
from extension_arms import CUE, CUES, Method, every_method, methods
from extension_results import plot, summary
from harness import (
    Line,
    Run,
    add_training_arguments,
    autocast,
    carry_out,
    chosen,
    kept_folder,
    load,
    logged,
    require,
    short_texts_at_once,
    show,
    study_parser,
    train,
)
from keeping_questions import all_answered, raw_questions
from rates import add_rate_arguments, rates_of
from result_parts import Parts
from rope_patch import patch_model
from rope_patch.eval import loss_by_position, passkey, short_text
from rope_patch.eval.measures.prompt_grid import DEPTHS
from rope_patch.layout.special_tokens import SpecialTokens, cut_document
from rope_patch.prompts.wordings import PASSKEY_FILLER
from token_text import first_rows, read_documents
from trl_ext.data.cues import cue_ids

GIB = 1 << 30
Stage = Literal["only", "first", "last"]
WARM_UP = 2  # steps of --cost without a count
SPANS = [(64, 8192), (8192, 16384), (16384, 32768), (32768, 65536)]


class Steps(TrainerCallback):
    """Seconds of each optimizer step, until the GPU is done."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self.begin)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rescaled(args: argparse.Namespace, schedule: str | None, target: int) -> Any:
    """The model under a schedule, or as it is."""
    model = load(args.model)
    return model if schedule is None else patch_model(model, schedule, factor=target / args.window)


def rows_of(documents: list[Any], special: SpecialTokens, length: int) -> Dataset:
    """Rows of `length` tokens, each document on its own, without its last, shorter one."""
    rows = [row for d in documents for row in cut_document(d.tolist(), length, special, keep_rest=False)]
    if not rows:
        raise ValueError(f"no document of the training split has {length} tokens: give longer ones.")
    return Dataset.from_dict({"input_ids": rows})


def rate_of(stage: Stage, steps: int) -> dict[str, Any]:
    """Fields of the learning rate: two stages have one rise and one fall, as one stage has."""
    rise = max(steps // 8, 1)
    if stage == "first":
        return {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": rise}
    fall = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    # one step for AdamW, whose averages begin anew
    return {**fall, "warmup_steps": 1 if stage == "last" else rise}


def train_method(
    model: Any,
    tokenizer: Any,
    method: Method,
    args: argparse.Namespace,
    seed: int,
    steps: int,
    at_once: int,
    stage: Stage = "only",
    rate: float | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Train in place, at --learning-rate or `rate`; what it cost and its log. One that `folder` has goes on."""
    rows_a_step = max(args.step_tokens // method.read, 1)
    together = max(min(at_once // method.read, rows_a_step), 1)
    if args.step_tokens % method.read or rows_a_step % together:
        raise ValueError(
            f"--step-tokens must hold a whole number of rows of {method.read} tokens, and of forwards of {together} "
            f"of them, got {args.step_tokens}."
        )
    assert method.fields is not None
    fields: dict[str, Any] = {
        "learning_rate": args.learning_rate if rate is None else rate,
        **rate_of(stage, steps),
        "weight_decay": 0.0,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": max(steps // 8, 1),
        "max_steps": steps,
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": rows_a_step // together,
        **method.fields,
        **args.override,
    }
    # a cue is put behind rows that leave room for it
    fields["max_length"] = method.read if "cue" in fields else method.row
    gpu, watch = torch.cuda.is_available(), Steps()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    kept = None if folder is None else folder / stage
    trainer = train(model, tokenizer, args.rows(method.row), fields, seed, args.compile, kept, callbacks=[watch])
    timed = watch.seconds[WARM_UP:] or watch.seconds  # one that went on may have none left
    return {
        "train_seconds": time.perf_counter() - begin,
        "seconds_a_step": statistics.median(timed) if timed else None,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if gpu else None,
        "rows_at_once": together,
        "rows_a_step": rows_a_step,
        "log": logged(trainer, "step", "loss", "kl", "num_tokens"),
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What two stages cost together; rows and seconds of a step are those of the first."""
    peaks = [c["peak_gib"] for c in (first, second) if c["peak_gib"] is not None]
    return {
        **first,
        "train_seconds": first["train_seconds"] + second["train_seconds"],
        "peak_gib": max(peaks, default=None),
        "log": first["log"] + second["log"],
    }


def lengths_within(args: argparse.Namespace, target: int) -> list[int]:
    """Of --lengths, those that a model for `target` is asked at."""
    return [n for n in args.lengths if n <= max(target, args.window)]


def needles(tokenizer: Any, books: list[list[int]], args: argparse.Namespace) -> dict[Needle, dict[int, list[Exam]]]:
    """The prompts whose digits are graded under teacher forcing, over ten depths, the same for every model."""
    filler = tokenizer(PASSKEY_FILLER, add_special_tokens=False)["input_ids"]
    lengths = lengths_within(args, max(args.targets))
    passkey_text = filler * (max(lengths) // len(filler) + 1)
    exams: dict[Needle, dict[int, list[Exam]]] = {}
    for kind in NEEDLES:
        texts = [passkey_text] if kind == "passkey" else books
        exams[kind] = {}
        for length in lengths:
            rng = random.Random(f"{kind} {length}")
            exams[kind][length] = [
                needle_exam(kind, tokenizer, texts[trial % len(texts)], length, depth, rng)
                for trial, depth in itertools.product(range(args.digit_trials), DEPTHS)
            ]
    return exams


def measure(model: Any, tokenizer: Any, args: argparse.Namespace, target: int, parts: Parts) -> dict[str, Any]:
    """Everything that is measured of a model, under autocast as in training, but for what `parts` has."""
    begin = time.perf_counter()
    model.eval()  # a view that is sampled in training is not in force
    lengths = lengths_within(args, target)
    with autocast(model):
        figures: Line = {
            "loss_by_position": parts.get("losses", partial(losses, model, args.val_rows)),
            "passkey": parts.get("passkey", partial(passkeys_found, model, tokenizer, lengths, args)),
            "teacher_forced": parts.get("teacher_forced", partial(teacher_forced, model, lengths, args)),
            "short": None,
            "short_mean": None,
        }
        if args.choosing is not None:
            rows = args.choosing[:, :target]
            figures["choice"] = parts.get("choice", partial(mean_loss, model, rows))
        within = {(test, n): questions for (test, n), questions in args.asked.items() if n in lengths}
        figures["asked"] = all_answered(model, tokenizer, within, parts)
        if args.short_data is not None:
            short = short_text(
                model,
                tokenizer,
                data=args.short_data,
                limit=args.limit,
                batch_size=short_texts_at_once(model),
                remember=parts.remember,
            )
            figures |= {"short": short.accuracy, "short_mean": short.mean, "short_scores": short.scores}
    return {**figures, "measure_seconds": time.perf_counter() - begin}


def losses(model: Any, rows: torch.Tensor) -> list[dict[str, float]]:
    """Loss between the edges of spans."""
    curve = loss_by_position(model, rows, progress=False)
    bins: list[dict[str, float]] = curve.bins(
        sorted({e for span in SPANS for e in span if e < curve.seq_len} | {curve.seq_len})
    )
    return bins


def mean_loss(model: Any, rows: torch.Tensor) -> float:
    """Behind the first tokens, which have too little context."""
    curve = loss_by_position(model, rows, progress=False)
    return float(curve.mean(SPANS[0][0], curve.seq_len))


def passkeys_found(model: Any, tokenizer: Any, lengths: list[int], args: argparse.Namespace) -> dict[str, float]:
    """Passkeys as written, by length, in the wording that all lines of the results were asked in."""
    found = passkey(model, tokenizer, lengths, trials=args.trials, wordings=(0,), chat_template="off", progress=False)
    return {str(n): share for n, share in zip(lengths, found.by_length, strict=True)}


def teacher_forced(model: Any, lengths: list[int], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Shares of right digits of each kind of needle, by length."""
    return {
        kind: {
            str(n): statistics.mean(right for exam in by_length[n] for _, right in accuracy(model, exam))
            for n in lengths
        }
        for kind, by_length in args.needles.items()
    }


class Trial(NamedTuple):
    """A method that is trained, or not, and measured."""

    seed: int
    target: int
    schedule: str | None
    name: str
    rate: float | None

    def key(self, args: argparse.Namespace) -> list[Any]:
        """What makes two trials the same; what does not train has neither seed nor rate."""
        if self.name in ("native", "none"):
            return ["quality", self.target if self.schedule else None, self.schedule, self.name]
        of_training = [self.seed, args.tokens, self.rate, json.dumps(args.override)]
        return ["quality", self.target, self.schedule, self.name, *of_training]


def quality(args: argparse.Namespace, tokenizer: Any, cues: dict[str, int], trial: Trial) -> Iterator[Line]:
    """Train one method, if it trains, and measure it."""
    seed, target, schedule, name, rate = trial
    method = None if name == "native" else every_method(args.window, target, cues)[name]
    trains = method is not None and method.fields is not None
    key = trial.key(args)
    parts = Parts(args.out.with_suffix(".parts.jsonl") if args.checkpoints else None, {"key": key})
    training: Line = {}
    with kept_folder("-".join(map(str, key[:-1])), args.checkpoints) as folder:
        end = folder / "model"
        if trains:
            if "training" not in parts.known or not end.is_dir():
                parts.begin()
                parts.get("training", partial(train_into, end, args, tokenizer, cues, trial))
            training = parts.known["training"]
        model = load(end) if trains else rescaled(args, schedule, target)
        yield {
            "method": name,
            "schedule": schedule,
            "target": target,
            "seed": seed,
            "tokens": training["steps"] * args.step_tokens if training else 0,
            "learning_rate": rate if trains else None,
            "override": args.override,
            **training,
            **measure(model, tokenizer, args, target, parts),
        }


def train_into(end: Path, args: argparse.Namespace, tokenizer: Any, cues: dict[str, int], trial: Trial) -> Line:
    """Train one method in its stages and save the model; what it cost."""
    seed, target, schedule, name, rate = trial
    model, method = rescaled(args, schedule, target), every_method(args.window, target, cues)[name]
    kept = end.parent if args.checkpoints else None
    steps = max(args.tokens // args.step_tokens, 1)
    of_long = round(method.long * steps)
    stage: Stage = "first" if of_long else "only"
    cost = train_method(model, tokenizer, method, args, seed, steps - of_long, args.at_once, stage, rate, kept)
    if of_long:
        full = methods(args.window, target, cues[CUE])["full length"]
        long = train_method(model, tokenizer, full, args, seed, of_long, args.at_once, "last", rate, kept)
        cost = joined(cost, long)
    model.save_pretrained(end)
    return {**cost, "steps": steps}


def qualities(args: argparse.Namespace, tokenizer: Any, cues: dict[str, int], names: list[str]) -> list[Run]:
    """Every run of the comparison."""
    first, farthest = args.seeds[0], max(args.targets)
    plan = [Trial(first, farthest, None, "native", None)] if "native" in names else []
    for seed, target, schedule, name in itertools.product(args.seeds, args.targets, args.schedules, names):
        if name == "native":
            continue
        if name == "none":
            plan += [Trial(seed, target, schedule, name, None)] if seed == first else []
            continue
        of = {"method": name, "target": target, "schedule": schedule}
        plan += [
            Trial(seed, target, schedule, name, rate)
            for rate in rates_of(args, of, args.learning_rate, field="learning_rate")
        ]
    return [
        Run(
            f"{t.name:12} {t.schedule} to {t.target}, seed {t.seed}" + (f", rate {t.rate:g}" if t.rate else ""),
            {"kind": "quality", "key": t.key(args)},
            partial(quality, args, tokenizer, cues, t),
            # one that is kept goes on in the next slice of time, however long it takes
            None if args.checkpoints else {"kind": "quality", "method": t.name, "target": t.target},
        )
        for t in plan
    ]


def cost(
    args: argparse.Namespace, tokenizer: Any, seed: int, target: int, schedule: str, name: str, method: Method, n: int
) -> Iterator[Line]:
    """Seconds and peak memory of one method, with forwards of n tokens, alone on the GPU."""
    trained = train_method(rescaled(args, schedule, target), tokenizer, method, args, seed, WARM_UP + args.cost, n)
    settings = {"method": name, "schedule": schedule, "target": target, "seed": seed, "override": args.override}
    yield {**settings, "tokens_per_second": args.step_tokens / trained["seconds_a_step"], **trained}


def costs(args: argparse.Namespace, tokenizer: Any, cues: dict[str, int], names: list[str]) -> list[Run]:
    """Every method with one row at a time, and with as many as --at-once has."""
    runs, one_row = [], 1
    for seed, target, schedule, name in itertools.product(args.seeds, args.targets, args.schedules, names):
        method = every_method(args.window, target, cues).get(name)
        for n in (one_row, args.at_once):
            if method is None or method.fields is None or (n != one_row and n < 2 * method.read):
                continue
            key = ["cost", target, schedule, name, seed, n, json.dumps(args.override)]
            results = partial(cost, args, tokenizer, seed, target, schedule, name, method, n)
            alike = {"kind": "cost", "method": name, "target": target}
            runs.append(Run(f"{name:12} {schedule} to {target}", {"kind": "cost", "key": key}, results, alike))
    return runs


def shown(line: Line) -> str:
    """A line of the file in one of the terminal."""
    if line["kind"] == "cost":
        memory = f"{line['peak_gib']:.1f} GiB" if line["peak_gib"] else ""
        return f"{line['rows_at_once']} rows at once  {line['tokens_per_second']:,.0f} tokens/s  {memory}"
    last = line["loss_by_position"][-1]
    return f"loss {last['first']}..{last['end']} {last['loss']:.3f}  passkey {line['passkey']}"


def main() -> None:
    parser = study_parser(__doc__, "extension.jsonl", seeds=(0, 1, 2))
    add_training_arguments(
        parser, "max_length", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path, help="of token files, made with the model's tokenizer")
    parser.add_argument("--plot", type=Path, help="draw the file of --table: loss beyond the window, by method")
    parser.add_argument("--cost", type=int, help="steps that are timed; nothing is measured but time and memory")
    parser.add_argument("--window", type=int, default=8192, help="native window, in tokens")
    parser.add_argument("--targets", type=int, nargs="+", default=[65536, 32768])
    parser.add_argument("--schedules", nargs="+", default=["pi", "yarn"])
    parser.add_argument("--tokens", type=int, default=1 << 22)
    parser.add_argument("--step-tokens", type=int, default=1 << 16)
    parser.add_argument("--at-once", type=int, default=1 << 15, help="tokens of a forward, one row at least")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    add_rate_arguments(parser, "loss up to the target on --choosing-rows")
    parser.add_argument("--val-rows", type=int, default=4)
    parser.add_argument(
        "--choosing-rows", type=int, default=0, help="held-out rows behind them, for choosing rates and nothing else"
    )
    parser.add_argument("--prompts", type=int, default=0, help="passkeys and keyed numbers of each length, as written")
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps what a run trains until it is through")
    parser.add_argument("--val-length", type=int, default=65536)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536], help="of passkey")
    parser.add_argument("--trials", type=int, default=1, help="prompts of each length and of each of ten depths")
    parser.add_argument("--digit-trials", type=int, default=2, help="the same of prompts whose digits are graded")
    parser.add_argument("--short-data", type=Path)
    parser.add_argument("--limit", type=int, help="samples of each short-text benchmark; default: all")
    args = parser.parse_args()
    if args.table:
        show(args, summary, partial(plot, window=args.window))
        return
    require(parser, args, "model", "folder")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    cues = {name: len(cue_ids(tokenizer, name)) for name in CUES}
    target = max(args.targets)
    known = ["native", *every_method(args.window, target, cues)]
    names = chosen(parser, args, known, ["native", *methods(args.window, target, cues[CUE])])
    documents = read_documents(args.folder, "train")
    special = SpecialTokens.of(tokenizer)
    args.rows = cache(partial(rows_of, documents, special))
    if args.cost:
        carry_out(costs(args, tokenizer, cues, names), args, shown)
        return
    n_rows, begin = args.val_rows, torch.tensor(special.begin, dtype=torch.int64)
    n_text = args.val_length - len(begin)
    held_out = torch.from_numpy(first_rows(args.folder, "val", n_text, n_rows + args.choosing_rows))
    books = held_out[:n_rows].tolist()
    held_out = torch.cat([begin.expand(len(held_out), -1), held_out], 1)
    args.val_rows, args.choosing = held_out[:n_rows], held_out[n_rows:] if args.choosing_rows else None
    args.asked = raw_questions(tokenizer, books, lengths_within(args, target), args.prompts) if args.prompts else {}
    args.needles = needles(tokenizer, books, args)
    carry_out(qualities(args, tokenizer, cues, names), args, shown)


if __name__ == "__main__":
    main()
