"""LinearARD and its variants on a real model: what each wins back of a rescaled model, at equal tokens.

Run: python research/experiments/restoration.py MODEL --train books.jsonl.xz --val val.jsonl.xz [--short-data FOLDER]
         [--prompts 104] [--ruler 100 --squad FILE] [--arms NAME ...] [--seeds 0 1 2] [--rates RATE ... | --best FILE]
         [--checkpoints FOLDER] [--minutes 9] [--part K/N] [--out FILE.jsonl]
     python research/experiments/restoration.py --table FILE.jsonl ... [--plot FIGURE.png]

Each arm (restoration_arms.py) is rescaled, trained in one or two stages and measured after each: loss by position on
held-out books up to four windows; short-text accuracy through lm-eval, with --short-data; passkeys and keyed numbers
among look-alikes as the model writes them, with --prompts; RULER's tasks, with --ruler; and the KL from the native
model. One JSON line a stage is added to --out, with every prompt's score, and what is in it is not done again.

--rates trains each arm at each rate, in both stages as the paper has it. --best then takes of each arm the rate that
such a file has with the least "choice": the KL of the model's predictions from the native model's, in nats a token,
within the native window of --choosing-rows held-out books of which nothing else is reported. It is what the first stage
is to bring back, and needs none of the questions that arms are compared by. A line has the training of the stages
before its own as "before".

With --checkpoints a run that is cut off goes on: what it had measured is in OUT.parts.jsonl, and what its stages
trained is kept until it is through. --table prints the means over seeds of such files, with what was won back of the
model before its rescaling, rates, and differences with intervals; --plot draws loss by position of the arms under PI
4x, and what each keeps of short text by the loss it ends with.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

from harness import (
    Line,
    Run,
    add_training_arguments,
    autocast,
    carry_out,
    chosen,
    has,
    kept_folder,
    load,
    logged,
    require,
    short_texts_at_once,
    show,
    study_parser,
    train,
)
from keeping_questions import Asked, all_answered, raw_questions
from native_kl import kl_from
from rates import add_rate_arguments, rates_of
from restoration_arms import Arm, Stage, arms
from restoration_results import plot, tables
from result_lines import read_lines
from result_parts import Parts
from rope_patch import load_adapter, patch_model
from rope_patch.eval import loss_by_position, read_texts, short_text, text_rows
from rope_patch.eval.measures.harness import require_lm_eval
from rope_patch.eval.measures.ruler_prompts import RulerPrompts
from rope_patch.layout.special_tokens import SpecialTokens
from ruler_prompts import RULER_TASKS, kept_prompts, ruler_scores
from trl_ext.data.long_documents import cut_into_rows

QUARTERS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16)  # of the window, at which spans of loss by position end
CHOOSING = 8192  # tokens of a row that rates are chosen by, at most: both models' predictions are held whole


@dataclass(frozen=True)
class Data:
    """What all runs share.

    Args:
        tokenizer: of the model.
        rows: training rows of a length.
        val: rows for loss by position, int64 [rows, tokens].
        choosing: rows by which rates are chosen, within the window.
        native: the model as it is.
        asked: questions by test and length.
        ruler: RULER's prompts, None to leave it out.
    """

    tokenizer: Any
    rows: Callable[[int], Dataset]
    val: torch.Tensor
    choosing: torch.Tensor
    native: Any
    asked: dict[tuple[str, int], list[Asked]]
    ruler: RulerPrompts | None


def run(arm: Arm, key: Line, args: argparse.Namespace, data: Data) -> Iterator[Line]:
    """Train one arm, and measure it after each stage that --out does not have, or as it is where it has none."""
    known = {line["after"] for line in read_lines(args.out) if has(line, key)}
    before, trained = None, {}
    with kept_folder("-".join(map(str, key.values())), args.checkpoints) as folder:
        for stage in arm.stages:
            parts = Parts(args.out.with_suffix(".parts.jsonl") if args.checkpoints else None, {**key, "after": stage})
            training: Line = {}
            if stage is not None:
                end = folder / stage
                if "training" not in parts.known or not end.is_dir():
                    parts.begin()
                    parts.get("training", partial(train_stage, arm, stage, key, before, end, args, data))
                before, training = end, parts.known["training"]
            if stage not in known and (stage == arm.stages[-1] or not args.last_stage):
                model = begun(arm, before, args)
                whole = model.merge_and_unload() if before is not None and arm.lora is not None else model
                measured = measure(whole, args, data, parts)
                yield {"after": stage, "window": args.window, **measured, **training, "before": dict(trained)}
            trained[stage] = training


def begun(arm: Arm, before: Path | None, args: argparse.Namespace) -> Any:
    """The model of an arm after the stage that trained `before`, or as it begins."""
    if before is not None:
        return load_adapter(load(args.model), before, is_trainable=True) if arm.lora is not None else load(before)
    model = load(args.model)
    return model if arm.rescale is None else patch_model(model, arm.rescale[0], **arm.rescale[1])


def train_stage(
    arm: Arm, stage: Stage, key: Line, before: Path | None, end: Path, args: argparse.Namespace, data: Data
) -> Line:
    """Train one stage into a folder; how long it took and what was logged."""
    rate = {} if key["rate"] is None else {"learning_rate": key["rate"]}
    fields = {**arm.fields(stage), **rate, **args.override}
    rows = data.rows(fields["max_length"]).shuffle(key["seed"])
    adapters = arm.adapters() if before is None else None
    begin = time.perf_counter()
    model = begun(arm, before, args)
    trainer = train(model, data.tokenizer, rows, fields, key["seed"], args.compile, peft_config=adapters)
    seconds = time.perf_counter() - begin
    trainer.save_model(str(end))
    return {"train_seconds": seconds, "log": logged(trainer)}


def measure(model: Any, args: argparse.Namespace, data: Data, parts: Parts) -> Line:
    """Everything that is measured of a model, under autocast as in training, but for what `parts` has."""
    model.eval()
    with autocast(model):
        figures: Line = {
            **parts.get("losses", partial(losses, model, data.val, args.window)),
            "choice": parts.get("choice", partial(kl_from, data.native, model, data.choosing.tolist())),
        }
        if args.short_data:
            # through a chat template LAMBADA has no right answer from any model
            short = short_text(
                model,
                data.tokenizer,
                data=args.short_data,
                limit=args.limit,
                batch_size=short_texts_at_once(model),
                chat_template="off",
                remember=parts.remember,
            )
            figures |= {"short": short.accuracy, "short_mean": short.mean, "short_scores": short.scores}
        if data.asked:
            figures["asked"] = all_answered(model, data.tokenizer, data.asked, parts)
        if data.ruler is not None:
            figures["ruler"] = ruler_scores(model, data.tokenizer, data.ruler, parts)
    return figures


def losses(model: Any, val: torch.Tensor, window: int) -> Line:
    """Loss by position on held-out rows."""
    curve = loss_by_position(model, val, progress=False)
    edges = [64, *(window * k // 4 for k in QUARTERS)]
    return {
        "loss_in_window": curve.in_window(window) if curve.seq_len > window else curve.mean(64, curve.seq_len),
        "cliff": curve.cliff(window) if curve.seq_len > window + 1 else None,
        "loss_by_position": curve.bins([e for e in edges if e <= curve.seq_len]),
    }


def main() -> None:
    parser = study_parser(__doc__, "restoration.jsonl")
    add_training_arguments(parser)
    add_rate_arguments(parser, "KL from the native model")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--train", nargs="+")
    parser.add_argument("--val", nargs="+")
    parser.add_argument("--short-data", type=Path, help="folder with short-text benchmarks; default: not measured")
    parser.add_argument("--window", type=int, default=8192, help="of the model as it is")
    parser.add_argument("--val-length", type=int, default=32768)
    parser.add_argument("--val-rows", type=int, default=8)
    parser.add_argument("--choosing-rows", type=int, default=4, help="held-out rows behind them, for choosing rates")
    parser.add_argument("--limit", type=int, help="samples of each short-text benchmark; default: all")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768], help="of prompts")
    parser.add_argument("--prompts", type=int, default=0, help="passkeys and keyed numbers of each length")
    parser.add_argument(
        "--ruler", type=int, default=0, metavar="N", help="prompts of each of RULER's tasks and lengths"
    )
    parser.add_argument("--ruler-tasks", nargs="+", default=RULER_TASKS, help="default: the paper's twelve")
    parser.add_argument("--squad", type=Path, help="SQuAD's questions, for RULER")
    parser.add_argument("--last-stage", action="store_true", help="measure arms of two stages after the second alone")
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps what a run trains until it is through")
    args = parser.parse_args()
    if args.table:
        show(args, tables, plot)
        return
    require(parser, args, "model", "train", "val")
    if args.short_data or args.ruler:  # what is lacking is told before training
        require_lm_eval()
    known = arms(AutoConfig.from_pretrained(args.model).num_hidden_layers, args.window)
    names = chosen(parser, args, known)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    documents = Dataset.from_list([{"text": text} for text in read_texts(args.train)])

    @cache
    def rows(length: int) -> Dataset:
        cut, coverage = cut_into_rows(documents, tokenizer, length)
        print(coverage, flush=True)
        return cut

    held_out = list(read_texts(args.val))
    n_rows = args.val_rows + args.choosing_rows
    both = text_rows(tokenizer, held_out, seq_len=args.val_length, n_rows=n_rows)
    val, choosing = both[: args.val_rows], both[args.val_rows :, : min(args.window, CHOOSING)]
    # prompts begin as the tokenizer begins a text; what rows begin with must not stand in the middle of one
    books = val[:, len(SpecialTokens.of(tokenizer).begin) :]
    asked = raw_questions(tokenizer, books.tolist(), args.lengths, args.prompts) if args.prompts else {}
    prompts = kept_prompts(tokenizer, tokenizer.batch_decode(books[:4]), args, args.lengths) if args.ruler else None
    data = Data(tokenizer, rows, val, choosing, load(args.model).eval(), asked, prompts)

    def run_of(seed: int, name: str, rate: float | None) -> Run:
        key = {"arm": name, "rate": rate, "seed": seed}
        # one that is kept goes on in the next slice of time, however long it takes
        alike = None if args.checkpoints else {"arm": name}
        said = name if rate is None else f"{name} at {rate:g}"
        return Run(
            f"{said:28} seed {seed}",
            {**key, "after": known[name].stages[-1]},
            partial(run, known[name], key, args, data),
            alike,
        )

    def rates(name: str) -> list[float | None]:
        last = known[name].stages[-1]
        return [None] if last is None else rates_of(args, {"arm": name, "after": last}, None)

    # what does not train is the same with every seed
    runs = [
        run_of(seed, name, rate)
        for seed, name in itertools.product(args.seeds, names)
        if known[name].stages != [None] or seed == args.seeds[0]
        for rate in rates(name)
    ]
    carry_out(runs, args, shown)


def shown(line: Line) -> str:
    """A line of the file in one of the terminal."""
    short = f"  short {line['short_mean']:.3f}" if "short_mean" in line else ""
    return f"after {line['after'] or '-':6}  in window {line['loss_in_window']:.3f}  KL {line['choice']:.4f}{short}"


if __name__ == "__main__":
    main()
