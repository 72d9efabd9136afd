"""LinearARD and its variants on a real model: what each wins back of a rescaled model, at equal tokens.

Run: python benchmarks/restoration.py MODEL --train books.jsonl.xz --val val.jsonl.xz --short-data FOLDER
         [--arms NAME ...] [--seeds 0 1 2] [--out FILE.jsonl]

Each arm is rescaled, trained in one or two stages and measured: loss by position on held-out books up to 32K, and
short-text accuracy through lm-eval. One JSON line a run is added to --out, and runs that are in it are not done again.
"""

import argparse
import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import patch_model
from rope_patch.eval import loss_by_position, read_texts, recovery_ratio, short_text, text_rows
from trl_ext import RopeSFTConfig, RopeSFTTrainer
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
        lora: rank of adapters on q, k and v, None to train weights themselves.
        trainable: which weights stage 1 trains without adapters.
    """

    rescale: tuple[str, dict[str, Any]] | None
    distil: dict[str, Any] | None = None
    extend: dict[str, Any] | None = None
    lora: int | None = None
    trainable: str = "qkv"


PI4, PI8, YARN4 = ("pi", {"factor": 4.0}), ("pi", {"factor": 8.0}), ("yarn", {"factor": 4.0})
LR = {"learning_rate": 2e-4}
# as many tokens of next-token training as both stages have together
EQUAL = {"max_steps": 34}


def arms() -> dict[str, Arm]:
    """Every arm by name."""
    found = {"native": Arm(None)}
    for name, rescale in (("pi4", PI4), ("pi8", PI8), ("yarn4", YARN4)):
        found[name] = Arm(rescale)
        found[f"{name} cpt"] = Arm(rescale, extend={**LR, **EQUAL})
        found[f"{name} ard"] = Arm(rescale, LR)
        found[f"{name} ard+cpt"] = Arm(rescale, LR, LR)
    for lr in (2e-5, 5e-5, 1e-3):
        found[f"pi4 ard lr {lr:g}"] = Arm(PI4, {"learning_rate": lr})
    variants: dict[str, dict[str, Any]] = {
        "w/o v": {"relation_args": {"v": 0.0}},
        "attn+v": {"relation_args": {"q": 0.0, "k": 0.0, "attention": 1.0}},
        "+logit": {"logit_kl_args": {"weight": 1.0}},
        "query heads": {"relation_args": {"denominator": "query_heads"}},
        "pre-rope": {"relation_args": {"rope": "pre"}},
        "mse": {"relation_args": {"divergence": "mse"}},
    }
    for name, options in variants.items():
        found[f"pi4 ard {name}"] = Arm(PI4, {**LR, **options})
    found["pi4 hidden"] = Arm(PI4, {**LR, "objective": "hidden-distill"})
    found["pi4 ard all weights"] = Arm(PI4, LR, trainable="all")
    found["pi4 ard lora 64"] = Arm(PI4, {"learning_rate": 1e-3}, lora=64)
    found["yarn4 ard no factor"] = Arm(YARN4, {**LR, "relation_args": {"strip_attention_factor": True}})
    return found


def train(model: Any, tokenizer: Any, options: dict[str, Any], rows: Dataset, peft_config: Any, seed: int) -> Any:
    """One stage; returns the model and the trainer's log."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"save_strategy": "no", "report_to": [], "logging_steps": 8, "disable_tqdm": True, "seed": seed}
        device = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
        config = RopeSFTConfig(output_dir=folder, **{**options, **quiet, **device})
        trainer = RopeSFTTrainer(
            model=model, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=peft_config
        )
        trainer.train()
        return trainer.model, trainer.state.log_history


def run(arm: Arm, args: argparse.Namespace, tokenizer: Any, data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train and measure one arm."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # float32 master weights: what is trained is small steps on them, in bf16 autocast
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    if arm.rescale is not None:
        patch_model(model, arm.rescale[0], **arm.rescale[1])
    adapters = None
    if arm.lora is not None:
        targets = ["q_proj", "k_proj", "v_proj"]
        adapters = LoraConfig(r=arm.lora, lora_alpha=2 * arm.lora, target_modules=targets, task_type="CAUSAL_LM")
    logs, begin = {}, time.perf_counter()
    for stage, defaults in (("distil", DISTIL), ("extend", EXTEND)):
        given = getattr(arm, stage)
        if given is None:
            continue
        trained = {} if arm.lora is not None else {"trainable": arm.trainable if stage == "distil" else "all"}
        options = {**defaults, "bf16": device == "cuda", **trained, **given, **args.override}
        rows = data["rows"](options["max_length"]).shuffle(seed)
        model, logs[stage] = train(model, tokenizer, options, rows, adapters, seed)
        adapters = None
    seconds = time.perf_counter() - begin
    if arm.lora is not None:
        model = model.merge_and_unload()
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32)
    curve = loss_by_position(model, data["val"], progress=False)
    short = short_text(model, tokenizer, data=args.short_data, limit=args.limit, batch_size=64)
    edges = [e for e in EDGES if e <= curve.seq_len]
    return {
        "loss_in_window": curve.in_window(WINDOW) if curve.seq_len > WINDOW else curve.mean(64, curve.seq_len),
        "cliff": curve.cliff(WINDOW) if curve.seq_len > WINDOW + 1 else None,
        "loss_by_position": curve.bins(edges),
        "short": short.accuracy,
        "short_mean": short.mean,
        "train_seconds": seconds,
        "log": {stage: [e for e in log if "loss" in e] for stage, log in logs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--val", nargs="+", required=True)
    parser.add_argument("--short-data", required=True)
    parser.add_argument("--arms", nargs="+", default=list(arms()))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--val-length", type=int, default=32768)
    parser.add_argument("--val-rows", type=int, default=8)
    parser.add_argument("--limit", type=int, help="samples of each short-text benchmark; default: all")
    parser.add_argument("--override", type=json.loads, default={}, help="RopeSFTConfig fields of every stage, as JSON")
    parser.add_argument("--out", type=Path, default=Path("restoration.jsonl"))
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    documents = Dataset.from_list([{"text": text} for text in read_texts(args.train)])
    cut: dict[int, Dataset] = {}

    def rows(length: int) -> Dataset:
        if length not in cut:
            cut[length] = cut_into_rows(documents, tokenizer, length)
        return cut[length]

    val = text_rows(tokenizer, read_texts(args.val), seq_len=args.val_length, n_rows=args.val_rows)
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.is_file() else []
    known = {(r["arm"], r["seed"]): r for r in done}
    native = next((r for r in done if r["arm"] == "native"), None)
    for seed in args.seeds:
        for name in args.arms:
            if (name, seed) in known:
                continue
            found = run(arms()[name], args, tokenizer, {"rows": rows, "val": val}, seed)
            native = native or (found if name == "native" else None)
            if native is not None:
                found["recovery"] = recovery_ratio(found["short"], native["short"])
            with args.out.open("a") as out:
                out.write(json.dumps({"arm": name, "seed": seed, **found}) + "\n")
            figures = {
                "in window": found["loss_in_window"],
                "cliff": found["cliff"],
                "short": found["short_mean"],
                "recovery %": found.get("recovery"),
                "seconds": found["train_seconds"],
            }
            shown = "  ".join(f"{k} {v:.3f}" for k, v in figures.items() if v is not None)
            print(f"{name:24} seed {seed}  {shown}", flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
