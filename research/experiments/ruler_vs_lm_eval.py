"""RULER scores of one model through lm-eval alone and through rope_patch.eval, in one run.

Run: python research/experiments/ruler_vs_lm_eval.py MODEL [--length 4096] [--samples 24] [--out FILE.json]
The tasks are those that lm-eval can make without the network. Prompts are drawn by the same generators but from other
seeds, so scores agree within the scatter of so many samples, not exactly.
"""

import argparse
import json
import time
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.eval import ruler

TASKS = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    begin = time.perf_counter()
    ours = ruler(
        model,
        tokenizer,
        [args.length],
        tasks=TASKS,
        samples=args.samples,
        batch_size=args.batch_size,
        chat_template="off",
    )
    ours_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size, max_length=args.length + 128),
        tasks=TASKS,
        task_manager=TaskManager(metadata={"max_seq_lengths": [args.length], "tokenizer": args.model}),
        limit=args.samples,
        bootstrap_iters=0,
    )
    theirs_seconds = time.perf_counter() - begin
    rows = {
        task: {"ours": ours.scores[task][0], "lm_eval": theirs["results"][task][f"{args.length},none"]}
        for task in TASKS
    }
    for task, row in rows.items():
        print(f"{task:18} ours {row['ours']:.3f}   lm-eval {row['lm_eval']:.3f}")
    print(f"seconds: ours {ours_seconds:.0f}, lm-eval {theirs_seconds:.0f} (it makes 500 prompts a task)")
    if args.out:
        facts = {"length": args.length, "samples": args.samples, "model": args.model, "scores": rows}
        seconds = {"ours": ours_seconds, "lm_eval": theirs_seconds}
        args.out.write_text(json.dumps({**facts, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
