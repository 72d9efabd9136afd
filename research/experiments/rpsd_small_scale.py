"""RPSD and what its paper compares it with, at a scale of minutes: retrieval far beyond the window it was taught in.

Run: python research/experiments/rpsd_small_scale.py MODEL [--train TEXT ...] [--val TEXT ...] [--taught FOLDER]
         [--arms NAME ...] [--seeds 0 1 2] [--minutes 9] [--part K/N] [--out FILE.jsonl]
     python research/experiments/rpsd_small_scale.py --table FILE.jsonl ... [--plot FIGURE.png] [--arms NAME ...]

A small model retrieves too badly to show anything, so it is taught first, in a short window: steps of text in turn
with steps of exams (see `exams`), once, into --taught. Every arm then extends it with ABF by the same tokens of long
rows, and is measured: exams by length and by answer position, loss by position. In --mix of the pieces of the short
window that long rows are made of an exam is hidden, so what there is to find is never further away than it was taught.
"taught" is the model as it was taught, "abf" that under ABF, without training. Texts default to the sources of Python's
standard library. One JSON line an arm and seed is added to --out, and what is in it is not done again.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from exams import KINDS, Exam, Kind, accuracy, make_exam
from harness import (
    Line,
    Run,
    add_training_arguments,
    autocast,
    carry_out,
    chosen,
    fields_but,
    load,
    logged,
    require,
    show,
    study_parser,
    train,
)
from result_lines import orderings, read_lines, spread
from rope_patch import patch_model
from rope_patch.eval import loss_by_position, read_texts, standard_library_files, text_rows
from rope_patch.eval.results.figures import add_legend, compact, new_figure, save_figure
from rope_patch.layout.special_tokens import SpecialTokens
from trl_ext.data.long_documents import cut_into_rows

# of teaching
TEACH: dict[str, Any] = {
    "max_steps": 400,
    "per_device_train_batch_size": 4,
    "gradient_checkpointing": False,
    "completion_only_loss": True,
    "train_sampling_strategy": "sequential",
    "learning_rate": 5e-4,
}
SETTINGS = ("short", "long", "mix", "steps", "rows", "theta", "learning_rate", "exams", "spacing")  # kept in results
SELF = {"objective": "self-distill"}
SKIP = {**SELF, "view": "skip"}
LONGCE = {"objective_args": {"longce": {"short_context": 1024, "stride": 512}}}


def arms(long: int) -> dict[str, dict[str, Any] | None]:
    """Name -> fields of RopeSFTConfig; None for what is not trained."""
    return {
        "taught": None,
        "abf": None,
        "standard": {"objective": "clm"},
        "longce": {"objective": "clm", **LONGCE},
        "pose baseline": {"objective": "clm", "view": "skip"},
        "skip": SKIP,
        "cyclic": {**SELF, "view": "cyclic"},
        "dilation": {**SELF, "view": "dilation"},
        "chunk-permute": {**SELF, "view": "chunk-permute"},
        "nope": {**SELF, "view": "nope"},
        "fixed skip": {**SKIP, "view_args": {"split": long // 2, "skip": long // 2}},
        "forward kl": {**SKIP, "objective_args": {"direction": "forward"}},
        "w/ clm": {**SKIP, "objective_args": {"kl_weight": 0.0, "view_clm": 1.0}},
        "dropout": {**SELF, "objective_args": {"control": {"kind": "dropout", "strength": 0.1}}},
        # a layer's mask for every score is let go of and drawn again
        "noise": {
            **SELF,
            "objective_args": {"control": {"kind": "attention_noise", "strength": 0.1}},
            "gradient_checkpointing": True,
        },
        "skip + longce": {**SKIP, **LONGCE},
        "skip, Y = 3 L": {**SKIP, "view_args": {"skip": {"law": "uniform", "high": 3 * long}}},
    }


# (metric, the arm that is lower, the arm that is higher, the paper's figures). Means over the lengths beyond the window
# that was taught, and by how much tenths of the text differ as places of the answer. The paper's are of Llama-3-8B:
# RULER-64K, the mean of 13 tasks, after 200 steps; of whole runs multi-key 2; for "ordinal" its NIAH-position.
ORDERINGS = [
    ("multikey", "standard", "skip", "31.0 < 82.6, whole runs; 13 tasks 47.9 < 59.2"),
    ("multikey", "forward kl", "skip", "57.8 < 59.2"),
    ("multikey", "w/ clm", "skip", "56.5 < 59.2"),
    ("multikey", "fixed skip", "skip", "55.1 < 59.2"),
    ("multikey", "dilation", "skip", "53.4 < 59.2"),
    ("multikey", "noise", "skip", "49.6 < 59.2"),
    ("multikey", "dropout", "skip", "48.9 < 59.2"),
    ("multikey", "chunk-permute", "skip", "46.2 < 59.2"),
    ("multikey", "nope", "skip", "29.5 < 59.2"),
    ("multikey", "standard", "dilation", "47.9 < 53.4"),
    ("multikey", "chunk-permute", "standard", "46.2 < 47.9"),
    ("multikey", "nope", "chunk-permute", "29.5 < 46.2"),
    ("multikey", "pose baseline", "skip", "70.6 < 82.6, whole runs"),
    ("multikey", "skip", "cyclic", "82.6 < 88.4, whole runs"),
    ("multikey", "standard", "longce", "66.4 < 70.5, eight needle tasks, whole runs"),
    ("ordinal", "standard", "skip", "44.0 < 59.4"),
    ("ordinal", "longce", "skip", "56.2 < 59.4"),
    ("ordinal", "pose baseline", "skip", "48.2 < 59.4"),
    ("ordinal", "standard", "pose baseline", "44.0 < 48.2"),
    ("ordinal", "cyclic", "skip", "42.0 < 59.4"),
    ("ordinal", "cyclic", "standard", "42.0 < 44.0"),
    ("multikey spread", "skip", "standard", "the paper's figure"),
    ("ordinal spread", "skip", "standard", "none"),
]


def score(run: dict[str, Any], metric: str) -> float:
    """A metric of `ORDERINGS`."""
    kind, _, spread_of = metric.partition(" ")
    if spread_of:
        known = [share for share in run[f"{kind} by position"] if share is not None]
        return max(known) - min(known)
    return statistics.mean(list(run[kind].values())[1:])


def texts(paths: list[str] | None, held_out: bool) -> Iterator[str]:
    """Documents to train on or to measure with."""
    if paths is not None:
        yield from read_texts(paths)
        return
    for number, file in enumerate(standard_library_files()):
        if (number % 4 == 0) == held_out:
            yield file.read_text(encoding="utf-8", errors="replace")


def lessons(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, seed: int = 0
) -> Dataset:
    """Rows of the short window, a step of text and a step of exams in turn; of exams the answers have labels."""
    rows, _ = cut_into_rows(Dataset.from_list([{"text": d} for d in documents]), tokenizer, args.short)
    text, begin = rows["input_ids"], SpecialTokens.of(tokenizer).begin
    fields = {**TEACH, **args.teach}
    n_rows = fields["per_device_train_batch_size"] * fields.get("gradient_accumulation_steps", 1)

    def made() -> Iterator[dict[str, list[int]]]:
        rng = random.Random(2 * seed)
        haystacks = itertools.cycle(text)
        plain = itertools.cycle(random.Random(2 * seed + 1).sample(list(text), len(text)))
        for step, row in itertools.product(range(fields["max_steps"]), range(n_rows)):
            if step % 2 == 0:
                ids = next(plain)
                yield {"input_ids": ids, "completion_mask": [1] * len(ids)}
            else:
                kind, haystack = KINDS[row % len(KINDS)], next(haystacks)[len(begin) :]
                exam = make_exam(kind, tokenizer, haystack, args.short, args.spacing, rng, begin=begin)
                yield {"input_ids": exam.ids, "completion_mask": exam.answered}

    return Dataset.from_generator(made)


def long_rows(documents: list[str], tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Dataset:
    """Rows of documents, each on its own, with exams in some of their pieces; the text goes on behind an exam.

    A row begins as the tokenizer begins a text, and no other piece of it does.
    """
    special = SpecialTokens.of(tokenizer)
    ids = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]

    def made() -> Iterator[dict[str, list[int]]]:
        rng = random.Random(1)
        for document in ([*plain, *special.end] for plain in ids):
            row: list[int] = []
            used = 0
            while True:
                begin = () if row else special.begin
                text = document[used : used + args.short - len(begin)]
                if len(begin) + len(text) < args.short:
                    break
                piece, n_text = [*begin, *text], len(text)
                if rng.random() < args.mix:
                    exam = make_exam(rng.choice(KINDS), tokenizer, text, args.short, args.spacing, rng, begin=begin)
                    piece, n_text = exam.ids, exam.n_text
                row += piece
                used += n_text
                if len(row) >= args.long:
                    yield {"input_ids": row[: args.long]}
                    row = []

    return Dataset.from_generator(made)


def extend(model: Any, tokenizer: Any, rows: Dataset, seed: int, options: dict[str, Any], compiled: bool) -> list[Any]:
    """One run; what its log says of loss and speed."""
    fields = {
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 10,
        **options,
    }
    trainer = train(model, tokenizer, rows, fields, seed, compiled)
    return logged(trainer, "step", "loss", "ce", "kl", "tokens_per_second")


def teach(args: argparse.Namespace, tokenizer: Any) -> None:
    """Retrieval in the short window, into `args.taught`."""
    model = load(args.model)
    rows = lessons(list(texts(args.train, False)), tokenizer, args)
    options = {"max_length": args.short, **TEACH, **args.override, **args.teach}
    for entry in extend(model, tokenizer, rows, 0, options, args.compile):
        print(entry, flush=True)
    model.save_pretrained(args.taught)
    tokenizer.save_pretrained(args.taught)


def sittings(tokenizer: Any, args: argparse.Namespace, val: torch.Tensor) -> dict[Kind, dict[int, list[Exam]]]:
    """The exams of each kind and length, which all arms and seeds sit: a question for 256 tokens, 24 at most."""
    begin = SpecialTokens.of(tokenizer).begin
    haystack = val[:, len(begin) :].flatten().tolist()
    exams: dict[Kind, dict[int, list[Exam]]] = {}
    for kind in KINDS:
        rng = random.Random(7)
        exams[kind] = {length: [] for length in args.lengths}
        for length, _ in itertools.product(args.lengths, range(args.exams)):
            room, questions = length - len(begin), min(24, max(8, length // 256))
            place = rng.randrange(len(haystack) - room + 1)
            text = haystack[place : place + room]
            exams[kind][length].append(make_exam(kind, tokenizer, text, length, args.spacing, rng, questions, begin))
    return exams


def measure(
    model: Any, exams: dict[Kind, dict[int, list[Exam]]], args: argparse.Namespace, val: torch.Tensor
) -> dict[str, Any]:
    """Exams and loss by position, at true positions and under autocast as in training."""
    model.eval()  # a view that is sampled in training is not in force
    figures: dict[str, Any] = {}
    with autocast(model):
        for kind, by_length in exams.items():
            graded = {
                length: [answer for exam in sat for answer in accuracy(model, exam)]
                for length, sat in by_length.items()
            }
            figures[kind] = {
                str(length): statistics.mean(right for _, right in marks) for length, marks in graded.items()
            }
            beyond = [answer for length, marks in graded.items() if length > args.short for answer in marks]
            tenths = [[right for depth, right in beyond if int(10 * depth) == tenth] for tenth in range(10)]
            figures[f"{kind} by position"] = [statistics.mean(t) if t else None for t in tenths]
        curve = loss_by_position(model, val, progress=False)
    edges = {e for e in (64, args.short, 2 * args.short, 4 * args.short, 8 * args.short) if e < curve.seq_len}
    return {**figures, "loss_by_position": curve.bins(sorted({*edges, curve.seq_len}))}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds, with half of their span, and the paper's orderings."""
    lengths = list(runs[0]["multikey"])
    bins = [f"loss {b['first']}-{b['end']}" for b in runs[0]["loss_by_position"]]
    head = ["arm", "seeds", *(f"{kind} {n}" for kind in KINDS for n in lengths), *bins, "seconds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for arm in dict.fromkeys(r["arm"] for r in runs):
        same = [r for r in runs if r["arm"] == arm]
        columns = [[r[kind][n] for r in same] for kind in KINDS for n in lengths]
        columns += [[r["loss_by_position"][k]["loss"] for r in same] for k in range(len(bins))]
        cells = [spread(c, 3) for c in columns]
        seconds = f"{statistics.mean(r['train_seconds'] for r in same):.0f}"
        lines.append(f"| {arm} | {len(same)} | " + " | ".join(cells) + f" | {seconds} |")
    return "\n".join([*lines, "", *orderings(ORDERINGS, runs, score)])


def plot(runs: list[dict[str, Any]], path: Path) -> list[Path]:
    """A row for each kind of exam: accuracy by length, and beyond the short window by where the answer is."""
    figure, axes = new_figure(2 * len(KINDS))
    for kind, by_length, by_depth in zip(KINDS, axes[::2], axes[1::2], strict=True):
        for number, arm in enumerate(dict.fromkeys(r["arm"] for r in runs)):
            same = [r for r in runs if r["arm"] == arm]
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "marker": "."}
            lengths = list(same[0][kind])
            by_length.plot(range(len(lengths)), [statistics.mean(r[kind][n] for r in same) for n in lengths], **style)
            tenths = list(zip(*(r[f"{kind} by position"] for r in same), strict=True))
            known = [(5 + 10 * k, statistics.mean(t)) for k, t in enumerate(tenths) if None not in t]
            by_depth.plot([d for d, _ in known], [a for _, a in known], label=arm, **style)
            by_length.set_xticks(range(len(lengths)), [compact(int(n)) for n in lengths])
        by_length.set(title=kind, xlabel="tokens", ylabel="accuracy")
        by_depth.set(title="beyond the window", xlabel="place of the answer, %")
    for panel in axes:
        panel.grid(alpha=0.25)
    add_legend(figure, axes[1], 5)
    return save_figure(figure, path)


def main() -> None:
    parser = study_parser(__doc__, "rpsd_small_scale.jsonl")
    add_training_arguments(parser)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--train", nargs="+", help="default: three quarters of the standard library's files")
    parser.add_argument("--val", nargs="+", help="default: the other quarter")
    parser.add_argument("--taught", type=Path, default=Path("taught"))
    parser.add_argument("--short", type=int, default=2048, help="tokens of the window that retrieval is taught in")
    parser.add_argument("--long", type=int, default=8192, help="tokens of a row that arms are trained on")
    parser.add_argument("--teach", type=fields_but(), default={}, help="RopeSFTConfig fields of teaching, as JSON")
    parser.add_argument("--mix", type=float, default=0.5, help="share of a long row's pieces that hold an exam")
    parser.add_argument("--steps", type=int, default=256, help="of each arm")
    parser.add_argument("--rows", type=int, default=1, help="of a step of each arm")
    parser.add_argument("--theta", type=float, default=8e5, help="base of ABF")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384, 32768])
    parser.add_argument("--exams", type=int, default=16, help="of each kind and length")
    parser.add_argument("--spacing", type=int, default=30, help="tokens from a sentence of an exam to the next")
    parser.add_argument("--val-rows", type=int, default=4)
    args = parser.parse_args()
    if args.table:
        show(args, table, plot)
        return
    require(parser, args, "model")
    names = chosen(parser, args, arms(args.long))
    settings = {k: getattr(args, k) for k in SETTINGS}
    if other := next((r["settings"] for r in read_lines(args.out) if r["settings"] != settings), None):
        changed = ", ".join(f"{k} {other[k]}" for k in SETTINGS if other[k] != settings[k])
        parser.error(
            f"{args.out} has runs with {changed}, which one table cannot hold beside these: give another --out"
        )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if not (args.taught / "config.json").is_file():
        teach(args, tokenizer)
    val = text_rows(tokenizer, texts(args.val, True), seq_len=max(args.lengths), n_rows=args.val_rows)
    rows = long_rows(list(texts(args.train, False)), tokenizer, args)
    exams = sittings(tokenizer, args, val)
    abf = {"theta": args.theta, "max_position_embeddings": max(args.lengths)}

    def results(name: str, seed: int) -> Iterator[Line]:
        model, arm = load(args.taught), arms(args.long)[name]
        log: list[dict[str, Any]] = []
        begin = time.perf_counter()
        if name == "abf":
            patch_model(model, "abf", **abf)
        if arm is not None:
            of_all = {
                "rescale": "abf",
                "rescale_args": abf,
                "max_length": args.long,
                "max_steps": args.steps,
                "gradient_accumulation_steps": args.rows,
                "learning_rate": args.learning_rate,
            }
            log = extend(model, tokenizer, rows.shuffle(seed), seed, {**of_all, **args.override, **arm}, args.compile)
        seconds = time.perf_counter() - begin
        yield {"train_seconds": seconds, **measure(model, exams, args, val), "log": log, "settings": settings}

    runs = [
        Run(f"{name:16} seed {seed}", {"arm": name, "seed": seed}, partial(results, name, seed), {"arm": name})
        for seed, name in itertools.product(args.seeds, names)
    ]
    carry_out(
        runs,
        args,
        lambda line: "  ".join(f"{kind} " + " ".join(f"{a:.2f}" for a in line[kind].values()) for kind in KINDS),
    )


if __name__ == "__main__":
    main()
