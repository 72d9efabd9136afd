"""A whole `rope-patch extend` of a shape with random weights: minutes by stage and peak memory beside its plan.

Run:   python benchmarks/extension_run.py --data BOOKS.jsonl --tokenizer FOLDER --folder FOLDER --out FILE.json
           [--shape llama-3-8b] [--to 131072] [--loss-rows 1] [--ruler-tasks 1]
           [--options '{"train": "qlora", "rows": 8}']
Case:  weights of the checkpoint in --folder are random, in bfloat16, made if they are not there. The tokenizer may have
fewer entries than the vocabulary. --options are those of `trl_ext.extend`. The loss is measured on --loss-rows rows and
RULER has --ruler-tasks tasks, where `extend` takes four of each; the plan is that of the run as shortened.
Times: of stages as `extend` tells them, and of training steps as their logs are written. Peak memory is what PyTorch
had allocated: of other stages in this process, of training on the GPU that took most.
"""

import argparse
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from distillation_step import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rope_patch.base.environment import device_name
from trl_ext import extend
from trl_ext.extension import choices
from trl_ext.extension.machine import GIB
from trl_ext.extension.plan import ExtensionPlan
from trl_ext.runs.folder import read_run_record
from trl_ext.runs.progress import Progress


def make_checkpoint(shape: str, tokenizer: Path, folder: Path, device: str) -> None:
    """Write a checkpoint with random weights, and the tokenizer without its chat template."""
    config = AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]})
    words = AutoTokenizer.from_pretrained(tokenizer)
    config.vocab_size = max(config.vocab_size, len(words))  # of the tiny shape
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    words.chat_template = None
    words.model_max_length = config.max_position_embeddings
    words.save_pretrained(folder)
    model.save_pretrained(folder)


class Watch:
    """When each stage began, what PyTorch had allocated within it, and when each training step was logged."""

    def __init__(self, training: Path, write: Callable[[], None]) -> None:
        self.training, self.write = training, write
        self.stages: list[dict[str, Any]] = []
        self.steps: list[Progress] = []
        self.ended = threading.Event()
        self.start("reading and planning")
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def tell(self, line: str) -> None:
        """A line of `extend`; those that begin a stage follow an empty line."""
        print(line, flush=True)
        if line.startswith("\n"):
            self.start(line.strip())
        self.stages[-1].setdefault("lines", []).append([round(time.time() - self.stages[-1]["began"], 1), line[-200:]])

    def start(self, stage: str) -> None:
        """Begin a stage."""
        self.end()
        if self.stages:
            self.write()  # a run that is killed leaves the stages that it ended
        self.stages.append({"stage": stage, "began": time.time()})

    def end(self) -> None:
        """End the last stage."""
        if self.stages:
            self.stages[-1]["seconds"] = time.time() - self.stages[-1]["began"]
        if torch.cuda.is_available():
            if self.stages:
                self.stages[-1]["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            torch.cuda.reset_peak_memory_stats()

    def _follow(self) -> None:
        while not self.ended.wait(0.1):
            progress = Progress.read(self.training)
            if progress is not None and (not self.steps or self.steps[-1].step != progress.step):
                self.steps.append(progress)

    def training_times(self) -> dict[str, Any]:
        """Seconds from the beginning of the stage to its first step, of each step, of saving what was trained, and of
        exporting it.
        """
        stage = next((stage for stage in self.stages if stage["stage"].startswith("Training")), None)
        if stage is None or not self.steps:
            return {}
        ends = [self.steps[0].began, *(step.written for step in self.steps)]
        steps = zip(self.steps, ends, ends[1:], strict=False)
        times: dict[str, Any] = {
            "loading": ends[0] - stage["began"],
            "steps": [{"to": step.step, "seconds": after - before} for step, before, after in steps],
        }
        saved = self.training / "stage.json"
        if saved.is_file():
            trained = saved.stat().st_mtime
            times |= {"saving": trained - ends[-1], "exporting": stage["began"] + stage["seconds"] - trained}
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--to", type=int, default=131072)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--loss-rows", type=int, default=1)
    parser.add_argument("--ruler-tasks", type=int, default=len(choices.RULER_TASKS))
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--checkpoint-only", action="store_true", help="make the checkpoint and end")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background of a shell ignores
    begin, base = time.time(), args.folder / args.shape
    if not (base / "config.json").is_file():
        make_checkpoint(args.shape, args.tokenizer, base, "cuda" if torch.cuda.is_available() else "cpu")
        print(f"made the checkpoint in {time.time() - begin:.1f} s", flush=True)
    if args.checkpoint_only:
        return
    choices._EVAL_ROWS = args.loss_rows
    choices.RULER_TASKS = choices.RULER_TASKS[: args.ruler_tasks]  # type: ignore[assignment]
    plans: list[ExtensionPlan] = []
    plan_of = ExtensionPlan.of

    def kept(*given: Any) -> ExtensionPlan:
        plans.append(plan_of(*given))
        return plans[-1]

    ExtensionPlan.of = kept  # type: ignore[method-assign]
    output = args.folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    facts: dict[str, Any] = {
        "shape": args.shape,
        "to": args.to,
        "loss_rows": args.loss_rows,
        "ruler_tasks": args.ruler_tasks,
        "options": args.options,
        "device": device_name(torch.cuda.is_available()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }

    def write() -> None:
        for plan in plans:
            facts["planned"] = {
                "minutes": asdict(plan.minutes),
                "gib": (plan.memory.total if plan.engine is None else plan.engine.bytes) / GIB,
                "rows": plan.rows,
                "tokens": plan.tokens,
                "steps": plan.steps,
                "engine": None if plan.engine is None else plan.engine.config,
                "choices": {choice.name: choice.text for choice in plan.choices.all},
            }
        done = output / "training/stage.json"
        facts["measured"] = {
            "stages": watch.stages,
            "training": watch.training_times(),
            "figures": read_run_record(done) if done.is_file() else None,
        }
        if args.out:
            args.out.write_text(f"{json.dumps(facts, indent=1)}\n")

    watch = Watch(output / "training", write)
    try:
        print(extend(base, to=args.to, data=args.data, output=output, tell=watch.tell, **args.options))
    except (Exception, KeyboardInterrupt) as failure:
        facts["error"] = repr(failure)[-2000:]
        raise
    finally:  # what was measured until then is written all the same
        watch.end()
        watch.ended.set()
        watch.thread.join()
        write()
        print(json.dumps(facts, indent=1), flush=True)


if __name__ == "__main__":
    main()
