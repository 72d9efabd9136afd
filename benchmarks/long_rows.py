"""How long rows get on one GPU: memory and tokens per second with and without `long_rows`, beside TRL's own trainer.

Run:   python benchmarks/long_rows.py --out FILE.jsonl [--minutes 6] [--layers 8] [--cases clm:65536:on trl:65536 ...]
           [--shape llama-3-8b] [--lora 64] [--steps 1]
Shape: random weights in bf16, batch 1, adapters on q, k and v, gradient checkpointing. A case is METHOD:TOKENS, or
METHOD:TOKENS:on for `long_rows="on"`. "clm" is next-token training; "self-distill" has a skip in the middle of the row,
in one forward; "trl" is TRL's SFTTrainer with the same settings, "trl-offload" with its `activation_offloading=True`.
Each case trains on one short row, then on --steps whole ones, which are timed and whose peak memory is measured.
Host memory is pinned before.

Cases run in a process of their own, one after the other, and each writes a line as it ends, also where memory ran out.
One that would pass --minutes, going by the arithmetic of its work and the rate so far, is left out with a line.
--layers takes fewer layers of the shape: time and memory are those of the layers there are, and what the others would
add to memory by arithmetic (weights, and checkpoints that stay on the device) is written too.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from distillation_step import SHAPES, stand_in_tokenizer, synchronize
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from trl_ext import RopeSFTConfig, RopeSFTTrainer
from trl_ext.memory.offloaded import PIECE, pinned_bytes
from trl_ext.memory.plan import host_memory

GIB = 1 << 30
CASES = (
    "clm:65536",
    "clm:65536:on",
    "clm:131072:on",
    "clm:262144:on",
    "self-distill:65536",
    "self-distill:131072:on",
    "self-distill:262144:on",
    "trl:65536",
    "trl-offload:65536",
    "trl-offload:131072",
    "clm:342000:on",
    "clm:524288:on",
)
METHODS = ("clm", "self-distill", "trl", "trl-offload")
TINY = 64  # rows of the tiny shape are so many times shorter
WARM_UP = 4096  # tokens of the first row
LEAST_LEFT = 1 * GIB  # of an earlier case: above that a new process starts


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    method: str
    length: int
    is_on: bool

    @classmethod
    def of(cls, text: str) -> "Case":
        method, _, rest = text.partition(":")
        length, _, on = rest.partition(":")
        if method not in METHODS or not length.isdigit() or on not in ("", "on"):
            raise argparse.ArgumentTypeError(f"a case is METHOD:TOKENS or METHOD:TOKENS:on, got {text!r}")
        if on and method.startswith("trl"):
            raise argparse.ArgumentTypeError(f"long_rows is not an option of TRL's trainer, got {text!r}")
        return cls(method, int(length), bool(on))

    def __str__(self) -> str:
        return f"{self.method}:{self.length}{':on' if self.is_on else ''}"

    def work(self, config: Any, length: int) -> float:
        """Multiplications and additions of a step, about: forward, recompute, and backward without weight gradients."""
        hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        weights = config.num_hidden_layers * (2 * hidden * (heads + keys) + 3 * hidden * config.intermediate_size)
        matrices = 3 * 2 * weights * length  # forward, recompute, backward of inputs; 2 for a product and a sum
        attention = 4.5 * 4 * heads * config.num_hidden_layers * length**2 / 2  # backward is 2.5 forwards
        if self.method != "self-distill":
            return matrices + attention
        return 1.5 * matrices + 1.75 * attention  # n / 2 copies, with the prefix and themselves as keys


class Watch(TrainerCallback):
    """Time and peak memory of all steps but the first, or so many of them."""

    def __init__(self, unwatched: int = 1) -> None:
        self.unwatched = unwatched
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        if state.global_step == self.unwatched and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize()
        if state.global_step > self.unwatched:
            self.seconds.append(time.perf_counter() - self.begin)


def config_of(args: argparse.Namespace) -> Any:
    shape = {"model_type": "llama", **SHAPES[args.shape]}
    changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    config = AutoConfig.for_model(**{**shape, **changes})
    config.all_layers = shape["num_hidden_layers"]
    return config


def build(config: Any) -> Any:
    has_gpu = torch.cuda.is_available()
    with torch.device("cuda" if has_gpu else "cpu"):
        dtype = torch.bfloat16 if has_gpu else torch.float32
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)


def training_options(folder: str, n_steps: int, rows: int) -> dict[str, Any]:
    """Fields of SFTConfig for `n_steps` steps of `rows` rows that are tokens already, in order, with checkpointing."""
    has_gpu = torch.cuda.is_available()
    return {
        "output_dir": folder,
        "per_device_train_batch_size": rows,
        "max_steps": n_steps,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "bf16": has_gpu,
        "use_cpu": not has_gpu,
    }


def make_trainer(case: Case, length: int, args: argparse.Namespace, model: Any, folder: str, watch: Watch) -> Any:
    vocabulary = model.config.vocab_size
    sizes = [min(WARM_UP, length), *[length] * args.steps]
    options = training_options(folder, len(sizes), rows=1)
    # twice the row, for the view to reach beyond it
    factor = max(2 * length / model.config.max_position_embeddings, 2.0)
    own: dict[str, Any] = {"rescale": "pi", "rescale_args": {"factor": factor}}
    own["long_rows"] = "on" if case.is_on else "off"
    if case.method == "self-distill":
        own |= {"objective": "self-distill", "view": "skip", "view_args": {"split": length // 2}}
        sizes[0] = length // 2 + min(WARM_UP, length) // 2  # the split has to lie in every row
    is_trl = case.method.startswith("trl")
    if case.method == "trl-offload":
        options["activation_offloading"] = True
    make_config: Any = SFTConfig if is_trl else RopeSFTConfig
    return (SFTTrainer if is_trl else RopeSFTTrainer)(
        model=model,
        args=make_config(**options, **({} if is_trl else own)),
        train_dataset=Dataset.from_dict({"input_ids": [torch.randint(0, vocabulary, (n,)).tolist() for n in sizes]}),
        processing_class=stand_in_tokenizer(vocabulary),
        peft_config=LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=["q_proj", "k_proj", "v_proj"]),
        callbacks=[watch],
    )


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Train one case, and say what it took."""
    length = case.length if args.shape != "tiny" else case.length // TINY
    config, watch = config_of(args), Watch()
    model = build(config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, length, args, model, folder, watch)
        plan = getattr(trainer, "memory_plan", None)
        if plan is not None and plan.on and plan.offloaded_layers:
            pin(pinned_bytes(plan.offloaded // plan.offloaded_layers) * plan.offloaded_layers)
        trainer.train()
    seconds = sum(watch.seconds) / len(watch.seconds)
    line = {
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "tflops": case.work(config, length) / seconds / 1e12,
    }
    if torch.cuda.is_available():
        line |= memory(trainer.model, config, plan, length)
    if plan is not None:
        on, off = plan.memory_when_on.total, plan.memory.total
        line |= {"planned_gib": (on if case.is_on else off) / GIB, "offloaded_layers": plan.offloaded_layers * plan.on}
    return line


def pin(size: int) -> None:
    """Have the host's memory pinned before time counts: PyTorch keeps it for tensors that come."""
    held = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(-(-size // PIECE))]
    del held


def memory(model: Any, config: Any, plan: Any, length: int) -> dict[str, Any]:
    """Peak memory, and what the layers that were left out would add."""
    peak = torch.cuda.max_memory_allocated() / GIB
    line = {"peak_gib": peak, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
    more = config.all_layers - config.num_hidden_layers
    if not more or plan is None:
        return line
    layers = model.get_base_model().model.layers  # with their adapters
    weights = sum(p.numel() * p.element_size() for p in layers.parameters()) / len(layers)
    checkpoint = plan.memory.checkpoints / (config.num_hidden_layers + 1)  # bytes of a layer's input
    on_host = 0
    if plan.on:  # of all layers, as many as the host has room for beside those that are pinned there by now
        room = host_memory() + plan.offloaded
        on_host = min(config.all_layers, room // pinned_bytes(int(checkpoint)))
    kept = config.num_hidden_layers - plan.offloaded_layers * plan.on  # on the device, and so in `peak`
    added = more * weights + (config.all_layers - on_host - kept) * checkpoint
    return {**line, f"peak_gib_with_{config.all_layers}_layers": peak + added / GIB}


def worker(cases: list[Case], args: argparse.Namespace) -> None:
    """Run cases until one leaves memory behind or the time is over; a line for each."""
    rate = 350e12 if torch.cuda.is_available() else 1e9  # operations a second, until a case has shown them
    for case in cases:
        predicted = case.work(config_of(args), case.length) * args.steps / rate
        if time.time() + predicted > args.until and torch.cuda.is_available():
            write(args.out, case, {"skipped": f"needs about {predicted:.0f} s more than --minutes allow"})
            continue
        begin = time.perf_counter()
        try:
            line = run(case, args)
            rate = line["tflops"] * 1e12
        except torch.OutOfMemoryError as error:
            line = {"out_of_memory": str(error).split(". ")[0]}
        except Exception as error:  # whatever a kernel or a library does not take: the other cases go on
            traceback.print_exc()
            line = {"error": f"{type(error).__name__}: {error}"[:500]}
        write(args.out, case, {**line, "wall_seconds": time.perf_counter() - begin})
        free()
        if torch.cuda.is_available() and torch.cuda.memory_allocated() > LEAST_LEFT:
            return  # a traceback or a cycle holds the model: a new process goes on


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def write(out: Path, case: Case, line: dict[str, Any]) -> None:
    line = {"case": str(case), "method": case.method, "length": case.length, "long_rows": case.is_on, **line}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}, flush=True)


def done(out: Path) -> set[str]:
    """Cases that have a line."""
    return {line["case"] for text in out.read_text().splitlines() if "case" in (line := json.loads(text))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.of, default=[Case.of(text) for text in CASES])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="of the shape; all by default")
    parser.add_argument("--lora", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1, help="that are timed")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of a worker
    args = parser.parse_args()
    if args.until is not None:
        worker(args.cases, args)
        return
    facts = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "shape": args.shape,
        "layers": config_of(args).num_hidden_layers,
        "lora_rank": args.lora,
        "steps": args.steps,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(facts) + "\n")
    until = time.time() + 60 * args.minutes
    # memory in pieces that can grow: rows of other lengths would leave holes that nothing fits in
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    while left := [case for case in args.cases if str(case) not in done(args.out)]:
        command = [
            sys.executable,
            __file__,
            "--cases",
            *map(str, left),
            "--shape",
            args.shape,
            "--lora",
            str(args.lora),
        ]
        command += ["--steps", str(args.steps), "--out", str(args.out), "--until", str(until)]
        command += [] if args.layers is None else ["--layers", str(args.layers)]
        try:
            ended = subprocess.run(command, env=environment, timeout=max(until - time.time(), 1)).returncode
            why = f"the process ended with {ended}"
        except subprocess.TimeoutExpired:
            why = "ran past --minutes"
        still = [case for case in left if str(case) not in done(args.out)]
        if still == left or why == "ran past --minutes":
            for case in still[: None if why == "ran past --minutes" else 1]:
                write(args.out, case, {"error": why})


if __name__ == "__main__":
    main()
