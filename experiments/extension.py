"""A real model from 8K to 32K and 64K: methods that train in short windows beside full length, at equal tokens.

Run: python experiments/token_text.py TOKENS --train books.jsonl.xz ... --val held-out.jsonl.xz --tokenizer MODEL
         --tokens 12000000 --val-documents 8 --val-length 65536
     python experiments/extension.py MODEL TOKENS [--targets 65536 32768] [--schedules pi yarn] [--arms NAME ...]
         [--seeds 0 1 2] [--short-data FOLDER --limit 200] [--out FILE.jsonl] [--minutes 9] [--part K/N]
     python experiments/extension.py MODEL TOKENS --cost 6 [...]
     python experiments/extension.py --table FILE.jsonl ... [--plot FIGURE.png]

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
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from exams import NEEDLES, Exam, Needle, accuracy, needle_exam
from extension_results import plot, summary
from harness import (
    Line,
    Run,
    add_training_arguments,
    autocast,
    carry_out,
    chosen,
    load,
    logged,
    require,
    show,
    study_parser,
    train,
)
from token_text import first_rows, read_documents
from transformers import AutoTokenizer, TrainerCallback

from rope_patch import patch_model
from rope_patch.eval import loss_by_position, passkey, short_text
from rope_patch.eval.prompt_grid import DEPTHS
from rope_patch.eval.wordings import PASSKEY_FILLER
from trl_ext.cues import cue_ids

GIB = 1 << 30
CUE = "sentence"
Stage = Literal["only", "first", "last"]
WARM_UP = 2  # steps of --cost without a count
SPANS = [(64, 8192), (8192, 16384), (16384, 32768), (32768, 65536)]


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Args:
        fields: of RopeSFTConfig, None for no training.
        row: tokens of a row as it is cut from the text.
        read: tokens of it that are trained on, a cue included.
        long: share of the tokens that go to next-token training at full length, after the others.
    """

    fields: dict[str, Any] | None
    row: int
    read: int
    long: float = 0.0


def skip_distillation(max_skip: int, **view_args: Any) -> dict[str, Any]:
    """Fields of RopeSFTConfig: the model's own predictions at true positions teach those under a skip."""
    return {"objective": "self-distill", "view": "skip", "view_args": {"max_skip": max_skip, **view_args}}


def methods(window: int, target: int, cue: int) -> dict[str, Method]:
    """The methods that papers propose, their controls and skip distillation, by name.

    Args:
        window: native, in tokens.
        target: in positions.
        cue: tokens of EndPrompt's cue.
    """
    end = {"view": "endprompt", "view_args": {"target": target}, "cue": CUE}
    at_random = {"view_args": {"target": target, "placement": "random"}}
    factor = target / window
    return {
        "none": Method(None, window, window),
        "full length": Method({}, target, target),
        "endprompt": Method(end, window - cue, window),
        "et(pose)": Method({**end, **at_random}, window - cue, window),
        "b=0": Method({**end, "cue": "none"}, window, window),
        "pose": Method(
            {"view": "pose", "view_args": {"target": target, "window": window}}, min(4 * window, target), window
        ),
        "posaug": Method({"view": "posaug", "view_args": {"low": 1 / factor, "high": factor}}, window, window),
        "skip distil": Method(skip_distillation(target - window), window, window),
        "longrecipe": Method({"view": "longrecipe", "view_args": {"target": target}}, window, window),
    }


def combinations(window: int, target: int) -> dict[str, Method]:
    """Forms of skip distillation, and what none of the papers has; parents are "b=0", "skip distil" and "posaug".

    Args:
        window: native, in tokens.
        target: in positions.
    """
    far, factor = target - window, target / window
    skip = skip_distillation(far)
    by_rows = {"low": 1 / factor, "high": factor, "granularity": "sample"}
    scaled = {**by_rows, "law": "log-uniform"}

    def with_args(**args: Any) -> dict[str, Any]:
        return {**skip, "self_distill_args": args}

    fields_by_name: dict[str, dict[str, Any]] = {
        # what of the view or of the distillation does it
        "clm on skips": {"view": "skip", "view_args": skip["view_args"]},
        "skip distil near": skip_distillation(far // 4),
        "skip distil log": skip_distillation(far, law="log-uniform"),
        "skip distil late": skip_distillation(far, curriculum="step"),
        "several gaps": {
            "objective": "self-distill",
            "view": "pose",
            "view_args": {"target": target, "chunks": 4},
            "self_distill_args": {"reduction": "token"},
        },
        # another teacher, other weights of rows
        "native teacher": with_args(teacher="native"),
        "uniform rows": with_args(reduction="uniform"),
        "longce rows": with_args(kl_longce={"short_context": window // 8, "stride": window // 16}),
        "top rows": with_args(kl_top=0.5),
        # other methods with it, and by themselves
        "posaug, rows": {"view": "posaug", "view_args": by_rows},
        "posaug kl": {"objective": "self-distill", "view": "posaug", "view_args": scaled},
        "skip and posaug kl": {
            "objective": "self-distill",
            "view": "compose",
            "view_args": {"views": [{"view": "skip", "max_skip": far}, {"view": "posaug", **scaled}]},
        },
        "restore and extend": {**skip, "restore_every": 4},
    }
    long = {f"skip distil, {share:.0%} long": Method(skip, window, window, share) for share in (0.25, 0.5)}
    return {**{name: Method(fields, window, window) for name, fields in fields_by_name.items()}, **long}


def every_method(window: int, target: int, cue: int) -> dict[str, Method]:
    """`methods` and `combinations`."""
    return {**methods(window, target, cue), **combinations(window, target)}


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


def rows_of(documents: list[Any], length: int) -> Dataset:
    """Rows of `length` tokens, each document on its own, without its last, shorter one."""
    rows = [d[k : k + length].tolist() for d in documents for k in range(0, len(d) - length + 1, length)]
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
) -> dict[str, Any]:
    """Train in place; what it cost and its log."""
    rows_a_step = max(args.step_tokens // method.read, 1)
    together = max(min(at_once // method.read, rows_a_step), 1)
    if args.step_tokens % method.read or rows_a_step % together:
        raise ValueError(
            f"--step-tokens must hold a whole number of rows of {method.read} tokens, and of forwards of {together} "
            f"of them, got {args.step_tokens}."
        )
    assert method.fields is not None
    fields: dict[str, Any] = {
        "learning_rate": args.learning_rate,
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
    trainer = train(model, tokenizer, args.rows(method.row), fields, seed, args.compile, callbacks=[watch])
    return {
        "train_seconds": time.perf_counter() - begin,
        "seconds_a_step": statistics.median(watch.seconds[min(WARM_UP, steps - 1) :]),
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


def needles(tokenizer: Any, args: argparse.Namespace) -> dict[Needle, dict[int, list[Exam]]]:
    """The prompts whose digits are graded under teacher forcing, over ten depths, the same for every model."""
    filler = tokenizer(PASSKEY_FILLER, add_special_tokens=False)["input_ids"]
    lengths = lengths_within(args, max(args.targets))
    passkey_text = filler * (max(lengths) // len(filler) + 1)
    exams: dict[Needle, dict[int, list[Exam]]] = {}
    for kind in NEEDLES:
        texts = [passkey_text] if kind == "passkey" else args.val_rows.tolist()
        exams[kind] = {}
        for length in lengths:
            rng = random.Random(f"{kind} {length}")
            exams[kind][length] = [
                needle_exam(kind, tokenizer, texts[trial % len(texts)], length, depth, rng)
                for trial, depth in itertools.product(range(args.digit_trials), DEPTHS)
            ]
    return exams


def measure(model: Any, tokenizer: Any, args: argparse.Namespace, target: int) -> dict[str, Any]:
    """Loss by position, passkey as written, teacher-forced digits, and short text, under autocast as in training."""
    begin = time.perf_counter()
    model.eval()  # a view that is sampled in training is not in force
    with autocast(model):
        curve = loss_by_position(model, args.val_rows, progress=False)
        lengths = lengths_within(args, target)
        # the wording that all lines of the results were asked in
        keys = passkey(
            model, tokenizer, lengths, trials=args.trials, wordings=(0,), chat_template="off", progress=False
        )
        teacher_forced = {
            kind: {
                str(n): statistics.mean(right for exam in by_length[n] for _, right in accuracy(model, exam))
                for n in lengths
            }
            for kind, by_length in args.needles.items()
        }
        short = None
        if args.short_data is not None:
            short = short_text(model, tokenizer, data=args.short_data, limit=args.limit, batch_size=64)
    edges = sorted({e for span in SPANS for e in span if e < curve.seq_len} | {curve.seq_len})
    return {
        "loss_by_position": curve.bins(edges),
        "passkey": {str(n): a for n, a in zip(lengths, keys.by_length, strict=True)},
        "teacher_forced": teacher_forced,
        "short": None if short is None else short.accuracy,
        "short_mean": None if short is None else short.mean,
        "measure_seconds": time.perf_counter() - begin,
    }


def key_of(kind: str, seed: int, target: int, schedule: str | None, method: str, args: Any) -> list[Any]:
    """What makes two runs the same; what does not train has neither seed nor rate."""
    if method in ("native", "none"):
        return [kind, target if schedule else None, schedule, method]
    return [kind, target, schedule, method, seed, args.tokens, args.learning_rate, json.dumps(args.override)]


def quality(
    args: argparse.Namespace, tokenizer: Any, cue: int, seed: int, target: int, schedule: str | None, name: str
) -> Iterator[Line]:
    """Train one method, if it trains, and measure it."""
    model = rescaled(args, schedule, target)
    method = None if name == "native" else every_method(args.window, target, cue)[name]
    cost: dict[str, Any] = {}
    if method is not None and method.fields is not None:
        steps = max(args.tokens // args.step_tokens, 1)
        of_long = round(method.long * steps)
        stage: Stage = "first" if of_long else "only"
        cost = train_method(model, tokenizer, method, args, seed, steps - of_long, args.at_once, stage)
        if of_long:
            full = methods(args.window, target, cue)["full length"]
            cost = joined(cost, train_method(model, tokenizer, full, args, seed, of_long, args.at_once, "last"))
        cost["steps"] = steps
    yield {
        "method": name,
        "schedule": schedule,
        "target": target,
        "seed": seed,
        "tokens": cost["steps"] * args.step_tokens if cost else 0,
        "learning_rate": args.learning_rate if cost else None,
        "override": args.override,
        **cost,
        **measure(model, tokenizer, args, target),
    }


def qualities(args: argparse.Namespace, tokenizer: Any, cue: int, names: list[str]) -> list[Run]:
    """Every run of the comparison."""
    plan: list[tuple[int, int, str | None, str]] = [(args.seeds[0], max(args.targets), None, "native")]
    for seed, target, schedule in itertools.product(args.seeds, args.targets, args.schedules):
        plan += [(seed, target, schedule, name) for name in names if name != "none" or seed == args.seeds[0]]
    return [
        Run(
            f"{name:12} {schedule} to {target}, seed {seed}",
            {"kind": "quality", "key": key_of("quality", seed, target, schedule, name, args)},
            partial(quality, args, tokenizer, cue, seed, target, schedule, name),
            {"kind": "quality", "method": name, "target": target},
        )
        for seed, target, schedule, name in plan
    ]


def cost(
    args: argparse.Namespace, tokenizer: Any, seed: int, target: int, schedule: str, name: str, method: Method, n: int
) -> Iterator[Line]:
    """Seconds and peak memory of one method, with forwards of n tokens, alone on the GPU."""
    trained = train_method(rescaled(args, schedule, target), tokenizer, method, args, seed, WARM_UP + args.cost, n)
    settings = {"method": name, "schedule": schedule, "target": target, "seed": seed, "override": args.override}
    yield {**settings, "tokens_per_second": args.step_tokens / trained["seconds_a_step"], **trained}


def costs(args: argparse.Namespace, tokenizer: Any, cue: int, names: list[str]) -> list[Run]:
    """Every method with one row at a time, and with as many as --at-once has."""
    runs, one_row = [], 1
    for seed, target, schedule, name in itertools.product(args.seeds, args.targets, args.schedules, names):
        method = every_method(args.window, target, cue)[name]
        for n in (one_row, args.at_once):
            if method.fields is None or (n != one_row and n < 2 * method.read):
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
    parser.add_argument("--val-rows", type=int, default=4)
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
    cue = len(cue_ids(tokenizer, CUE))
    target = max(args.targets)
    names = chosen(parser, args, every_method(args.window, target, cue), methods(args.window, target, cue))
    documents = read_documents(args.folder, "train")
    args.rows = cache(partial(rows_of, documents))
    if args.cost:
        carry_out(costs(args, tokenizer, cue, names), args, shown)
        return
    args.val_rows = torch.from_numpy(first_rows(args.folder, "val", args.val_length, args.val_rows))
    args.needles = needles(tokenizer, args)
    carry_out(qualities(args, tokenizer, cue, names), args, shown)


if __name__ == "__main__":
    main()
