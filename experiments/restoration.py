"""LinearARD and its variants on a real model: what each wins back of a rescaled model, at equal tokens.

Run: python experiments/restoration.py MODEL --train books.jsonl.xz --val val.jsonl.xz --short-data FOLDER
         [--arms NAME ...] [--seeds 0 1 2] [--minutes 9] [--part K/N] [--out FILE.jsonl]
     python experiments/restoration.py --table FILE.jsonl ... [--plot FIGURE.png]

Each arm is rescaled, trained in one or two stages and measured after each: loss by position on held-out books up to
32K, and short-text accuracy through lm-eval. One JSON line a stage is added to --out, and what is in it is not done
again. --table prints the means over seeds of such files, with what was won back of the model before its rescaling;
--plot draws loss by position of the arms under PI 4x, and what each keeps of short text by the loss it ends with.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from harness import (
    Line,
    Run,
    add_training_arguments,
    autocast,
    carry_out,
    chosen,
    has,
    load,
    logged,
    require,
    show,
    study_parser,
    train,
)
from peft import LoraConfig
from result_lines import mean_of, read_lines, spread
from transformers import AutoTokenizer

from rope_patch import patch_model
from rope_patch.eval import loss_by_position, read_texts, recovery_ratio, short_text, text_rows
from rope_patch.eval.figures import add_legend, compact, mark_window, new_figure, save_figure
from trl_ext.restoration import DISTIL, EXTEND, cut_into_rows

WINDOW = 8192
EDGES = [64, 2048, 4096, 6144, 8192, 12288, 16384, 20480, 24576, 28672, 32768]


@dataclass(frozen=True)
class Arm:
    """One row of the comparison.

    Args:
        rescale: (name, options), None for the model as it is.
        distil: fields that differ from the authors' stage 1, None to leave it out.
        extend: fields that differ from the authors' stage 2, None to leave it out.
        lora: rank of adapters on q, k and v in both stages, with twice it as alpha; None to train weights themselves.
        dropout: of the adapters.
        trainable: which weights stage 1 trains without adapters.
        extended: which weights stage 2 trains without adapters; the paper those of q, k and v, what docs/results has
            from before all.
    """

    rescale: tuple[str, dict[str, Any]] | None
    distil: dict[str, Any] | None = None
    extend: dict[str, Any] | None = None
    lora: int | None = None
    dropout: float = 0.0
    trainable: str = "qkv"
    extended: str = "all"

    @property
    def last_stage(self) -> str | None:
        """After which it is measured last; None where none trains."""
        return "extend" if self.extend is not None else "distil" if self.distil is not None else None


PI4, PI8, YARN4 = ("pi", {"factor": 4.0}), ("pi", {"factor": 8.0}), ("yarn", {"factor": 4.0})
# ours, of the weights of q, k and v: 1e-3 did best of three in a draft of stage 1, 2e-4 was not compared with others.
# The authors take 2e-5 in both stages, for adapters of rank 1024.
DISTIL_LR, EXTEND_LR = {"learning_rate": 1e-3}, {"learning_rate": 2e-4}
# as many tokens of next-token training as both stages have together
EQUAL = {"max_steps": 34}
# the rows of a step of stage 1 together and without checkpointing: the same batch in fewer launches
AT_ONCE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "gradient_checkpointing": False}


def arms() -> dict[str, Arm]:
    """Every arm by name."""
    arms = {"native": Arm(None)}
    for name, rescale in (("pi4", PI4), ("pi8", PI8), ("yarn4", YARN4)):
        arms[name] = Arm(rescale)
        arms[f"{name} cpt"] = Arm(rescale, extend={**EXTEND_LR, **EQUAL})
        arms[f"{name} ard+cpt"] = Arm(rescale, DISTIL_LR, EXTEND_LR)
    # every field the paper's: the weights that it trains, all of them, and the authors' adapters
    arms["pi4 qkv"] = Arm(PI4, {}, {}, extended="qkv")
    arms["pi4 all (ours)"] = Arm(PI4, {}, {}, trainable="all")
    arms["pi4 lora 1024/2048"] = Arm(PI4, {}, {}, lora=1024, dropout=0.05)
    arms["pi4 qkv at our rates"] = Arm(PI4, DISTIL_LR, EXTEND_LR, extended="qkv")
    # the name in docs/results of the authors' rate on other weights than theirs: q, k and v, then all
    arms["pi4 ard+cpt as the authors"] = Arm(PI4, {}, {})
    for lr in (2e-5, 1e-3):
        arms[f"pi4 cpt lr {lr:g}"] = Arm(PI4, extend={"learning_rate": lr, **EQUAL})
    # the control with the tokens, rows and stages of LinearARD: next-token training in place of distillation
    control = {"objective": "clm", "learning_rate": 5e-4}
    for lr in (2e-4, 5e-4, 1e-3):
        arms[f"pi4 clm {lr:g}+cpt"] = Arm(PI4, {**control, "learning_rate": lr}, EXTEND_LR, trainable="all")
    # the same on the weights that LinearARD trains
    arms["pi4 clm qkv 0.001+cpt"] = Arm(PI4, {**control, "learning_rate": 1e-3}, EXTEND_LR)
    arms["pi8 clm 0.0005+cpt"] = Arm(PI8, control, EXTEND_LR, trainable="all")
    arms["yarn4 clm 0.0005+cpt"] = Arm(YARN4, control, EXTEND_LR, trainable="all")
    # predictions of the native model, in all rows, beside the next-token loss: the same stage with another target
    for weight in (1.0, 10.0):
        native = {
            "objective": "self-distill",
            "kl_weight": weight,
            "self_distill_args": {"teacher": "native", "direction": "forward"},
            "learning_rate": 5e-4,
        }
        arms[f"pi4 native kl {weight:g}+cpt"] = Arm(PI4, native, EXTEND_LR, trainable="all")
        arms[f"pi4 native kl {weight:g} qkv+cpt"] = Arm(PI4, {**native, **DISTIL_LR}, EXTEND_LR)
    for lr in (5e-5, 2e-4, 3e-3):
        arms[f"pi4 ard lr {lr:g}"] = Arm(PI4, {"learning_rate": lr})
    variants: dict[str, dict[str, Any]] = {
        "w/o v": {"relation_args": {"v": 0.0}},
        "attn+v": {"relation_args": {"q": 0.0, "k": 0.0, "attention": 1.0}},
        "+logit": {"logit_kl_args": {"weight": 1.0}},
        "query heads": {"relation_args": {"denominator": "query_heads"}},
        "pre-rope": {"relation_args": {"rope": "pre"}},
        "mse": {"relation_args": {"divergence": "mse"}},
    }
    for name, options in variants.items():
        arms[f"pi4 ard {name}"] = Arm(PI4, {**DISTIL_LR, **options})
    # what did better than the paper's form, together
    better = {**variants["attn+v"], **variants["+logit"]}
    arms["pi4 ard attn+v +logit+cpt"] = Arm(PI4, {**DISTIL_LR, **better}, EXTEND_LR)
    arms["pi4 hidden+cpt"] = Arm(PI4, {**DISTIL_LR, "objective": "hidden-distill"}, EXTEND_LR)
    arms["pi4 ard all weights"] = Arm(PI4, DISTIL_LR, trainable="all")
    arms["pi4 ard lora 64"] = Arm(PI4, DISTIL_LR, lora=64)
    arms["yarn4 ard no factor"] = Arm(YARN4, {**DISTIL_LR, "relation_args": {"strip_attention_factor": True}})
    return arms


def run(
    arm: Arm, args: argparse.Namespace, tokenizer: Any, data: dict[str, Any], seed: int, known: set[str]
) -> Iterator[dict[str, Any]]:
    """Train one arm, and measure it after each stage that is not known yet, or as it is where it has none."""
    model = load(args.model)
    if arm.rescale is not None:
        patch_model(model, arm.rescale[0], **arm.rescale[1])
    adapters = None
    if arm.lora is not None:
        targets = ["q_proj", "k_proj", "v_proj"]
        adapters = LoraConfig(
            r=arm.lora,
            lora_alpha=2 * arm.lora,
            lora_dropout=arm.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
    if arm.distil is None and arm.extend is None:
        yield {"after": None, **measure(model, tokenizer, args, data["val"])}
    for stage, defaults in (("distil", {**DISTIL, **AT_ONCE}), ("extend", EXTEND)):
        stage_fields = getattr(arm, stage)
        if stage_fields is None:
            continue
        trained = {"trainable": arm.trainable if stage == "distil" else arm.extended}
        if arm.lora is not None:
            trained = {"trainable": "all"}  # of the adapters
        options = {**defaults, "logging_steps": 8, **trained, **stage_fields, **args.override}
        rows = data["rows"](options["max_length"]).shuffle(seed)
        begin = time.perf_counter()
        trainer = train(model, tokenizer, rows, options, seed, args.compile, peft_config=adapters)
        seconds = time.perf_counter() - begin
        model, log, adapters = trainer.model, logged(trainer), None  # the model has the adapters now
        if stage not in known and not (args.last_stage and stage == "distil" and arm.extend is not None):
            with merged(model, arm.lora is not None) as whole:
                figures = measure(whole, tokenizer, args, data["val"])
            yield {"after": stage, **figures, "train_seconds": seconds, "log": log}


@contextmanager
def merged(model: Any, has_adapters: bool) -> Iterator[Any]:
    """The model with its adapters in its weights for a while, as it is measured."""
    if not has_adapters:
        yield model
        return
    model.merge_adapter()
    try:
        yield model.get_base_model()
    finally:
        model.unmerge_adapter()


def measure(model: Any, tokenizer: Any, args: argparse.Namespace, val: torch.Tensor) -> dict[str, Any]:
    """Loss by position and short-text accuracy, under autocast as in training."""
    with autocast(model):
        curve = loss_by_position(model, val, progress=False)
        short = short_text(model, tokenizer, data=args.short_data, limit=args.limit, batch_size=64)
    edges = [e for e in EDGES if e <= curve.seq_len]
    return {
        "loss_in_window": curve.in_window(WINDOW) if curve.seq_len > WINDOW else curve.mean(64, curve.seq_len),
        "cliff": curve.cliff(WINDOW) if curve.seq_len > WINDOW + 1 else None,
        "loss_by_position": curve.bins(edges),
        "short": short.accuracy,
        "short_mean": short.mean,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds, with the span of what is compared, and recovery of the model before its rescaling."""
    native = next(r for r in runs if r["arm"] == "native")
    spans = [(0, 8192), (8192, 16384), (16384, 32768)]
    head = ["arm", "after", "seeds", *(f"loss {a // 1024}-{b // 1024}K" for a, b in spans), "short text", "recovery %"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in runs:
        groups.setdefault((line["arm"], line["after"] or ""), []).append(line)
    for (arm, after), same in groups.items():
        cells = [spread([mean_of(r["loss_by_position"], a, b) for r in same], 3) for a, b in spans]
        cells += [spread([r["short_mean"] for r in same], 3)]
        cells += [spread([recovery_ratio(r["short"], native["short"]) for r in same], 1)]
        lines.append(f"| {arm} | {after} | {len(same)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# arm -> how the figure calls it
PLOTTED = {
    "native": "native",
    "pi4": "PI 4x",
    "pi4 ard+cpt": "LinearARD",
    "pi4 ard attn+v +logit+cpt": "attention, v, predictions",
    "pi4 hidden+cpt": "hidden states",
    "pi4 clm 0.0005+cpt": "next-token, all weights",
    "pi4 clm qkv 0.001+cpt": "next-token, q k v",
    "pi4 native kl 1+cpt": "native KL",
}


def plot(runs: list[dict[str, Any]], path: Path) -> list[Path]:
    """Left: loss by position after the last stage. Right: recovery of short text and loss of each seed and stage."""
    native = next(r for r in runs if r["arm"] == "native")
    bins = [(b["first"], b["end"]) for b in native["loss_by_position"]]
    figure, (curves, points) = new_figure(2, share_y=False)
    for number, (arm, label) in enumerate(PLOTTED.items()):
        same = [r for r in runs if r["arm"] == arm]
        last = [r for r in same if r["after"] != "distil"]
        color = f"C{number}"
        losses = [mean_of([b for r in last for b in r["loss_by_position"]], a, b) for a, b in bins]
        curves.plot([(a + b) / 2 for a, b in bins], losses, marker=".", color=color)
        for of_stage in (last, [r for r in same if r["after"] == "distil"]):
            points.scatter(
                [r["loss_in_window"] for r in of_stage],
                [recovery_ratio(r["short"], native["short"]) for r in of_stage],
                label=label if of_stage is last else None,
                edgecolors=color,
                facecolors=color if of_stage is last else "none",
            )
    curves.set_ylim(top=6)
    mark_window(curves, WINDOW)
    ticks = [0, 8192, 16384, 24576, 32768]
    curves.set_xticks(ticks, [compact(t) for t in ticks])
    curves.set(xlabel="position of the predicted token", ylabel="loss, nats per token")
    points.set(xlabel=f"loss within {compact(WINDOW)}, nats", ylabel="short text, % of the native model's")
    points.set(xlim=(None, 3.6), ylim=(91, 101))  # the rescaled model itself is far away
    points.set_title("rings: after stage 1", fontsize="small")
    for axes in (curves, points):
        axes.grid(alpha=0.25)
    add_legend(figure, points, 3)
    return save_figure(figure, path)


def main() -> None:
    parser = study_parser(__doc__, "restoration.jsonl")
    add_training_arguments(parser)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--train", nargs="+")
    parser.add_argument("--val", nargs="+")
    parser.add_argument("--short-data")
    parser.add_argument("--val-length", type=int, default=32768)
    parser.add_argument("--val-rows", type=int, default=8)
    parser.add_argument("--limit", type=int, help="samples of each short-text benchmark; default: all")
    parser.add_argument("--last-stage", action="store_true", help="measure arms of two stages after the second alone")
    args = parser.parse_args()
    if args.table:
        show(args, table, plot)
        return
    require(parser, args, "model", "train", "val", "short_data")
    names = chosen(parser, args, arms())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    documents = Dataset.from_list([{"text": text} for text in read_texts(args.train)])

    @cache
    def rows(length: int) -> Dataset:
        cut, coverage = cut_into_rows(documents, tokenizer, length)
        print(coverage, flush=True)
        return cut

    val = text_rows(tokenizer, read_texts(args.val), seq_len=args.val_length, n_rows=args.val_rows)

    def run_of(seed: int, name: str) -> Run:
        arm, key = arms()[name], {"arm": name, "seed": seed}

        def results() -> Iterator[Line]:
            known = {line["after"] for line in read_lines(args.out) if has(line, key)}
            return run(arm, args, tokenizer, {"rows": rows, "val": val}, seed, known)

        return Run(f"{name:28} seed {seed}", {**key, "after": arm.last_stage}, results, {"arm": name})

    runs = [run_of(seed, name) for seed, name in itertools.product(args.seeds, names)]
    carry_out(runs, args, shown)


def shown(line: Line) -> str:
    """A line of the file in one of the terminal."""
    return f"after {line['after'] or '-':6}  in window {line['loss_in_window']:.3f}  short {line['short_mean']:.3f}"


if __name__ == "__main__":
    main()
