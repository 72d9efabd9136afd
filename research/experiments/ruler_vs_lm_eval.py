"""RULER scores of one model through lm-eval alone and through rope_patch.eval, in one run.

Run: python research/experiments/ruler_vs_lm_eval.py MODEL [--length 4096] [--samples 24] [--out FILE.json]
         [--same-prompts] [--tasks NAME ...] [--text FILE]
The tasks are those that lm-eval can make without the network. Prompts are drawn by the same generators but from other
seeds, so scores agree within the scatter of so many samples, not exactly. With --same-prompts lm-eval's model class
answers our prompts: scores are then of the same prompts, and seconds of answering alone.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lm_eval
import torch
from eval_speed import timed_parts
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from result_lines import versions
from rope_patch.eval import read_texts, ruler
from rope_patch.eval.measures.harness import evaluate
from rope_patch.eval.measures.ruler import _task
from rope_patch.eval.measures.ruler_prompts import ruler_prompts

TASKS = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]


def same_prompts(model: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Scores of each task by both, and seconds of making prompts and of answering them."""
    n, texts = args.length, read_texts([args.text]) if args.text else []
    options = {"tasks": args.tasks, "samples": args.samples, "haystack": "\n".join(texts) or None}
    begin = time.perf_counter()
    prompts = ruler_prompts(tokenizer, [n], chat_template="off", progress=False, **options)
    made = time.perf_counter()
    with timed_parts() as parts:
        ours = ruler(model, tokenizer, prompts, chat_template="off", progress=False)
    answered = time.perf_counter()
    theirs = evaluate(
        model,
        tokenizer,
        [_task(task, documents) for (_, task), documents in prompts.items()],
        batch_size=args.batch_size,
        max_length=n + 128,
    )
    seconds = {"prompts": made - begin, "ours": answered - made, "lm_eval": time.perf_counter() - answered, **parts}
    scores = {
        task: {"ours": ours.scores[task][0], "lm_eval": metrics["score"]}
        for (_, task), (metrics, _) in zip(prompts, theirs, strict=True)
    }
    return {"scores": scores, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--same-prompts", action="store_true", help="ask lm-eval's model class our prompts")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="with --same-prompts")
    parser.add_argument("--text", help="with --same-prompts, for tasks that hide needles in running text")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    facts = {"length": args.length, "samples": args.samples, "model": args.model}
    if args.same_prompts:
        found = {**facts, "batch_size": args.batch_size, **same_prompts(model, tokenizer, args), **versions()}
        print(json.dumps(found))
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    begin = time.perf_counter()
    prompts = ruler_prompts(tokenizer, [args.length], tasks=TASKS, samples=args.samples, chat_template="off")
    ours = ruler(model, tokenizer, prompts, batch_size=args.batch_size, chat_template="off")
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
        seconds = {"ours": ours_seconds, "lm_eval": theirs_seconds}
        args.out.write_text(json.dumps({**facts, "scores": rows, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
