"""A real model from 8K to 32K and 64K: methods that train in short windows beside full length, at equal tokens.

Run: python experiments/token_text.py TOKENS --train books.jsonl.xz ... --val held-out.jsonl.xz --tokenizer MODEL
         --tokens 12000000 --val-documents 8 --val-length 65536
     python experiments/extension.py MODEL TOKENS [--targets 65536 32768] [--schedules pi yarn] [--methods NAME ...]
         [--seeds 0 1 2] [--short-data FOLDER --limit 200] [--out FILE.jsonl] [--minutes 9] [--part K/N]
     python experiments/extension.py MODEL TOKENS --cost 6 [...]
     python experiments/extension.py --summary FILE.jsonl ... [--plot FIGURE.png]

Every run rescales the model by target / window, under PI or YaRN, and trains all weights with RopeSFTTrainer on
--tokens tokens, --step-tokens in each step, in bf16 autocast with gradient checkpointing: all methods at one learning
rate, on rows cut from the same documents. A cue counts as tokens, and of PoSE those of the window. `none` is the
rescaled model without training, `native` the model as it is. --methods also takes the forms of skip distillation and
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
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from compiled import compiled_tokenwise
from datasets import Dataset
from exams import NEEDLES, Exam, Needle, accuracy, needle_exam
from extension_results import plot, summary
from result_lines import Deadline, add_line, read_lines, share, versions
from token_text import first_rows, read_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from rope_patch import patch_model
from rope_patch.eval import loss_by_position, passkey, short_text
from rope_patch.eval.retrieval import DEPTHS
from rope_patch.eval.wordings import PASSKEY_FILLER
from trl_ext import RopeSFTConfig, RopeSFTTrainer
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

    found: dict[str, dict[str, Any]] = {
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
    return {**{name: Method(fields, window, window) for name, fields in found.items()}, **long}


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


def load(args: argparse.Namespace, schedule: str | None, target: int) -> Any:
    """float32 weights, multiplied in bf16 autocast: what is trained is small steps on them."""
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
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


def train(
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
    gpu = torch.cuda.is_available()
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
        **method.fields,
        **args.override,
    }
    # a cue is put behind rows that leave room for it
    longest = method.read if "cue" in fields else method.row
    watch = Steps()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = RopeSFTConfig(
            output_dir=folder,
            **fields,
            max_length=longest,
            max_steps=steps,
            per_device_train_batch_size=together,
            gradient_accumulation_steps=rows_a_step // together,
            seed=seed,
            save_strategy="no",
            report_to=[],
            logging_steps=max(steps // 8, 1),
            disable_tqdm=True,
            bf16=gpu,
            use_cpu=not gpu,
        )
        trainer = RopeSFTTrainer(
            model=model,
            args=config,
            train_dataset=args.rows(method.row),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        with compiled_tokenwise(model, args.compile):
            trainer.train()
    log = [
        {k: e[k] for k in ("step", "loss", "kl", "num_tokens") if k in e}
        for e in trainer.state.log_history
        if "loss" in e
    ]
    return {
        "train_seconds": time.perf_counter() - begin,
        "seconds_a_step": statistics.median(watch.seconds[min(WARM_UP, steps - 1) :]),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if gpu else None,
        "rows_at_once": together,
        "rows_a_step": rows_a_step,
        "log": log,
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
    found: dict[Needle, dict[int, list[Exam]]] = {}
    for kind in NEEDLES:
        texts = [passkey_text] if kind == "passkey" else args.val_rows.tolist()
        found[kind] = {}
        for length in lengths:
            rng = random.Random(f"{kind} {length}")
            found[kind][length] = [
                needle_exam(kind, tokenizer, texts[trial % len(texts)], length, depth, rng)
                for trial, depth in itertools.product(range(args.digit_trials), DEPTHS)
            ]
    return found


def measure(model: Any, tokenizer: Any, args: argparse.Namespace, target: int) -> dict[str, Any]:
    """Loss by position, passkey as written, teacher-forced digits, and short text, under autocast as in training."""
    begin = time.perf_counter()
    model.eval()  # a view that is sampled in training is not in force
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
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


Key = tuple[Any, ...]


def key_of(kind: str, seed: int, target: int, schedule: str | None, method: str, args: Any) -> Key:
    """What makes two runs the same; what does not train has neither seed nor rate."""
    if method in ("native", "none"):
        return kind, target if schedule else None, schedule, method
    return kind, target, schedule, method, seed, args.tokens, args.learning_rate, json.dumps(args.override)


def quality(args: argparse.Namespace, tokenizer: Any, cue: int) -> None:
    """Every run of the comparison that is not in --out yet."""
    runs: list[tuple[int, int, str | None, str]] = [(args.seeds[0], max(args.targets), None, "native")]
    for seed, target, schedule in itertools.product(args.seeds, args.targets, args.schedules):
        chosen = args.methods or list(methods(args.window, target, cue))
        runs += [(seed, target, schedule, name) for name in chosen if name != "none" or seed == args.seeds[0]]
    for seed, target, schedule, name in share(runs, args.part):
        known = read_lines(args.out)
        key = key_of("quality", seed, target, schedule, name, args)
        if any(r["key"] == list(key) for r in known):
            continue
        ran = [r for r in known if r["kind"] == "quality"]
        alike = [r for r in ran if (r["method"], r["target"]) == (name, target)]
        needed = max((r["seconds"] for r in alike or ran), default=0)
        if not args.deadline.leaves(needed):
            print(f"{name} to {target} under {schedule}: not begun, it would take {needed:.0f} s", flush=True)
            return
        begin = time.perf_counter()
        model = load(args, schedule, target)
        method = None if name == "native" else every_method(args.window, target, cue)[name]
        cost: dict[str, Any] = {}
        if method is not None and method.fields is not None:
            steps = max(args.tokens // args.step_tokens, 1)
            of_long = round(method.long * steps)
            stage: Stage = "first" if of_long else "only"
            cost = train(model, tokenizer, method, args, seed, steps - of_long, args.at_once, stage)
            if of_long:
                full = methods(args.window, target, cue)["full length"]
                cost = joined(cost, train(model, tokenizer, full, args, seed, of_long, args.at_once, "last"))
            cost["steps"] = steps
        found = {
            "kind": "quality",
            "key": key,
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
        add_line(args.out, {**found, "seconds": time.perf_counter() - begin, **versions()})
        last = found["loss_by_position"][-1]
        shown = f"loss {last['first']}..{last['end']} {last['loss']:.3f}  passkey {found['passkey']}"
        print(
            f"{name:12} {schedule} to {target}, seed {seed}  {shown}  {found.get('train_seconds', 0):.0f} s", flush=True
        )
        del model
        gc.collect()


def cost(args: argparse.Namespace, tokenizer: Any, cue: int) -> None:
    """Seconds and peak memory of every method, alone on the GPU."""
    one_row, together = 1, args.at_once
    for seed, target, schedule in itertools.product(args.seeds, args.targets, args.schedules):
        for name, at_once in itertools.product(args.methods or methods(args.window, target, cue), (one_row, together)):
            method = every_method(args.window, target, cue)[name]
            key = ("cost", target, schedule, name, seed, at_once, json.dumps(args.override))
            same = at_once != one_row and at_once < 2 * method.read
            if method.fields is None or same or any(r["key"] == list(key) for r in read_lines(args.out)):
                continue
            if not args.deadline.leaves(0):
                return
            model = load(args, schedule, target)
            found = train(model, tokenizer, method, args, seed, WARM_UP + args.cost, at_once)
            told = {"method": name, "schedule": schedule, "target": target, "seed": seed, "override": args.override}
            rate = args.step_tokens / found["seconds_a_step"]
            add_line(args.out, {"kind": "cost", "key": key, **told, "tokens_per_second": rate, **found, **versions()})
            memory = f"{found['peak_gib']:.1f} GiB" if found["peak_gib"] else ""
            print(
                f"{name:12} to {target}, {found['rows_at_once']} rows at once  {rate:,.0f} tokens/s  {memory}",
                flush=True,
            )
            del model
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path, help="of token files, made with the model's tokenizer")
    parser.add_argument("--summary", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the file of --summary: loss beyond the window, by method")
    parser.add_argument("--cost", type=int, help="steps that are timed; nothing is measured but time and memory")
    parser.add_argument("--window", type=int, default=8192, help="native window, in tokens")
    parser.add_argument("--targets", type=int, nargs="+", default=[65536, 32768])
    parser.add_argument("--schedules", nargs="+", default=["pi", "yarn"])
    parser.add_argument("--methods", nargs="+", help="default: those of papers, their controls and skip distillation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
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
    parser.add_argument("--override", type=json.loads, default={}, help="RopeSFTConfig fields of every run, as JSON")
    parser.add_argument("--minutes", type=float, help="after which no run is begun")
    parser.add_argument("--compile", action="store_true", help="compile norms and MLPs while training")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th run from the K-th, for N processes")
    parser.add_argument("--out", type=Path, default=Path("extension.jsonl"))
    args = parser.parse_args()
    if args.summary:
        lines = read_lines(*args.summary)
        print(summary(lines))
        if args.plot:
            print(*plot(lines, args.window, args.plot))
        return
    if args.model is None or args.folder is None:
        parser.error("give MODEL and the folder of token files, or --summary")
    args.deadline = Deadline(args.minutes)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    cue = len(cue_ids(tokenizer, CUE))
    unknown = set(args.methods or ()) - set(every_method(args.window, max(args.targets), cue))
    if unknown:
        known = ", ".join(every_method(args.window, max(args.targets), cue))
        parser.error(f"unknown methods {', '.join(sorted(unknown))}; known: {known}")
    documents = read_documents(args.folder, "train")
    cut: dict[int, Dataset] = {}

    def rows(length: int) -> Dataset:
        if length not in cut:
            cut[length] = rows_of(documents, length)
        return cut[length]

    args.rows = rows
    if args.cost:
        cost(args, tokenizer, cue)
        return
    args.val_rows = torch.from_numpy(first_rows(args.folder, "val", args.val_length, args.val_rows))
    args.needles = needles(tokenizer, args)
    quality(args, tokenizer, cue)


if __name__ == "__main__":
    main()
