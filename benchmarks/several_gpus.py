"""What several GPUs give: tokens per second and memory of each GPU on 1, 2, 4 ... GPUs, by the engines' own configs.

Run:   python benchmarks/several_gpus.py --out FILE.jsonl [--gpus 1 2] [--cases self-distill pose ...] [--layers 12]
           [--length 65536] [--long_rows on] [--steps 2] [--minutes 9]
Shape: random weights, gradient checkpointing, AdamW, bf16. All weights, float32, of Qwen3-4B's shape or, for
relation-distill and clm-lora, adapters of rank 64 on q, k and v of Llama-3-8B's. On several GPUs a case is started by
accelerate with the config that `rope-patch train --accelerate-config NAME` takes; on one it is a plain process.

Cases with rows of their own on each GPU, so that tokens grow with the GPUs:
  self-distill      one row of 65536 tokens a GPU, a skip in the middle, in one forward        fsdp2
  pose              four rows of 8192 tokens a GPU, gaps up to 65536, next-token               fsdp2
  relation-distill  rows of 8192 tokens, one a GPU, LinearARD's first stage, adapters          ddp
  clm-lora          rows of 16384 tokens, one a GPU, next-token, adapters                      ddp
Cases whose one row all GPUs share, so that each has a part of it:
  ring, ulysses     self-distillation, its two views in two passes                             fsdp2-cp, zero3-sp
  ring-clm          next-token training                                                        fsdp2-cp
  ring-trl          the same by TRL's SFTTrainer with the same config                          fsdp2-cp

Each case takes one step of short rows, then --steps whole ones, which are timed; tokens are those of all GPUs, memory
is the peak of the GPU that has most. A line is written as each case ends. --layers takes fewer layers of the shape:
communication and computation both grow with layers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import yaml
from accelerate import PartialState
from datasets import Dataset
from distillation_step import SHAPES, stand_in_tokenizer
from long_rows import GIB, TINY, Watch, training_options
from peft import LoraConfig
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from rope_patch.base.environment import device_name
from trl_ext import RopeSFTConfig, RopeSFTTrainer
from trl_ext.recipes.launching import Launch

WARM_UP = 2048  # tokens of a row of the first step
SELF = {"objective": "self-distill", "view": "skip"}


@dataclass(frozen=True)
class Case:
    """What is trained, on what rows, under which engine.

    Args:
        engine: name of `--accelerate-config` on several GPUs.
        length: tokens of a row.
        fields: of RopeSFTConfig.
        shape: of the model.
        rows: of a micro-batch on each GPU, or of all of them where they share rows.
        adapters: whether adapters are trained, over weights of 16 bits, and not all weights.
        shared: whether all GPUs share each row.
        trainer: RopeSFTTrainer, or TRL's own.
    """

    engine: str
    length: int
    fields: dict[str, Any]
    shape: str = "qwen3-4b"
    rows: int = 1
    adapters: bool = False
    shared: bool = False
    trainer: type[SFTTrainer] = RopeSFTTrainer


CASES = {
    "self-distill": Case("fsdp2", 65536, SELF),
    "pose": Case("fsdp2", 8192, {"view": "pose", "view_args": {"target": 65536}}, rows=4),
    "relation-distill": Case("ddp", 8192, {"objective": "relation-distill"}, "llama-3-8b", adapters=True),
    "clm-lora": Case("ddp", 16384, {}, "llama-3-8b", adapters=True),
    "ring": Case("fsdp2-cp", 262144, SELF, shared=True),
    "ulysses": Case("zero3-sp", 131072, SELF, shared=True),
    "ring-clm": Case("fsdp2-cp", 131072, {}, shared=True),
    "ring-trl": Case("fsdp2-cp", 131072, {}, shared=True, trainer=SFTTrainer),
}


def build(case: Case, args: argparse.Namespace) -> Any:
    """Random weights, alike on all ranks, on the rank's own GPU."""
    shape = {"model_type": "llama", **SHAPES[args.shape or case.shape]}
    layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
    config = AutoConfig.for_model(**{**shape, **layers})
    torch.manual_seed(0)
    with torch.device(PartialState().device):
        dtype = torch.bfloat16 if case.adapters and torch.cuda.is_available() else torch.float32
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)


def fields_of(case: Case, length: int, window: int, n_steps: int, folder: str) -> dict[str, Any]:
    """Options of the trainer."""
    fields = dict(case.fields)
    reached = 2 * length
    if fields.get("view") == "skip" and not case.shared:  # GPUs that share a row run two whole passes anyway
        fields["view_args"] = {"split": length // 2}
    elif "view_args" in fields:
        reached = length * fields["view_args"]["target"] // case.length
        fields["view_args"] = {**fields["view_args"], "target": reached}
    if case.trainer is RopeSFTTrainer:
        fields |= {"rescale": "pi", "rescale_args": {"factor": max(reached / window, 2.0)}}
    return {**training_options(folder, n_steps, case.rows), **fields}


def length_of(case: Case, args: argparse.Namespace) -> int:
    """Tokens of a row."""
    length: int = case.length if args.length is None else args.length
    return length // TINY if args.shape == "tiny" else length


def train(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Train on this rank, and what it took on all."""
    length = length_of(case, args)
    state = PartialState(cpu=not torch.cuda.is_available())
    n_ranks = state.num_processes
    # Ulysses reads a row a rank and takes a step for each of them, which all ranks share
    in_turn = n_ranks if case.engine == "zero3-sp" else 1
    watch = Watch(in_turn)
    with tempfile.TemporaryDirectory() as folder:
        window = SHAPES[args.shape or case.shape]["max_position_embeddings"]
        options = fields_of(case, length, window, in_turn * (1 + args.steps), folder)
        if case.trainer is RopeSFTTrainer:
            options["long_rows"] = args.long_rows
        # before the model: ZeRO-3 makes its weights in parts
        config = (RopeSFTConfig if case.trainer is RopeSFTTrainer else SFTConfig)(**options)
        model = build(case, args)
        # a ring reads each row on every rank
        of_step = case.rows * (in_turn if case.shared else n_ranks)
        # a short row of a skip must have the split that all rows have
        short = length // 2 + min(WARM_UP, length) // 2 if "split" in options.get("view_args", {}) else WARM_UP
        lengths = [min(short, length)] * of_step + [length] * (of_step * args.steps)
        draw = torch.Generator().manual_seed(1)
        vocabulary = model.config.vocab_size
        rows = [torch.randint(0, vocabulary, (n,), generator=draw).tolist() for n in lengths]
        trainer = case.trainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=stand_in_tokenizer(vocabulary),
            peft_config=LoraConfig(r=64, lora_alpha=128, target_modules=["q_proj", "k_proj", "v_proj"])
            if case.adapters
            else None,
            callbacks=[watch],
        )
        trainer.train()
    seconds = sum(watch.seconds) / len(watch.seconds)
    peak = torch.tensor(torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0)
    if n_ranks > 1:
        peak = peak.to(state.device)
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX)
    # of a step, over all GPUs
    tokens = length * case.rows * (1 if case.shared else n_ranks)
    require_read(trainer, tokens * len(watch.seconds), in_turn)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_gib": float(peak),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        **planned(getattr(trainer, "memory_plan", None)),
    }


def planned(plan: Any) -> dict[str, Any]:
    """Whether `long_rows` was on, and what was planned for a GPU."""
    if plan is None:
        return {"long_rows": False}
    return {
        "long_rows": plan.on,
        "planned_gib": (plan.memory_when_on.total if plan.on else plan.memory.total) / GIB,
        "offloaded_layers": plan.offloaded_layers * plan.on,
    }


def require_read(trainer: Any, tokens: int, unwatched: int) -> None:
    """Fail where the steps that were timed, all but the first `unwatched`, did not read so many tokens."""
    read = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    if type(trainer) is RopeSFTTrainer and read[-1] - read[unwatched - 1] != tokens:
        raise RuntimeError(f"{tokens} tokens are timed and {read[-1] - read[unwatched - 1]:.0f} were read: {read}")


def worker(args: argparse.Namespace) -> None:
    """One rank of one case; the first one writes its line."""
    line = train(CASES[args.worker], args)
    if PartialState().is_main_process:
        args.out.write_text(json.dumps(line))


def command_of(name: str, n_gpus: int, out: Path, folder: Path, args: argparse.Namespace) -> list[str]:
    """What starts the ranks of one case."""
    case = CASES[name]
    own = [__file__, "--worker", name, "--out", str(out), "--steps", str(args.steps)]
    given = {flag: getattr(args, flag) for flag in ("shape", "layers", "length", "long_rows")}
    own += [f"--{flag}={value}" for flag, value in given.items() if value is not None]
    if n_gpus == 1:
        return [sys.executable, *own]
    if not torch.cuda.is_available():  # plain ranks that talk by gloo: what this script does is tested so
        return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(n_gpus), *own]
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(Launch(case.engine, n_gpus).settings()))
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *own]


def memory_in_use() -> dict[str, float]:
    """GiB that the GPUs hold before a case begins: where another program has them, its time does not count."""
    if not torch.cuda.is_available():
        return {}
    free = [torch.cuda.mem_get_info(gpu) for gpu in range(torch.cuda.device_count())]
    return {"gib_in_use_before": max(total - unused for unused, total in free) / GIB}


def measure(name: str, n_gpus: int, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """The line of a case, or why there is none."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        out = folder / "line.json"
        # memory in pieces that can grow: rows of other lengths would leave holes that nothing fits in
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if n_gpus == 1 and torch.cuda.is_available():  # Trainer would take all that it sees
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            environment["CUDA_VISIBLE_DEVICES"] = first
        command = command_of(name, n_gpus, out, folder, args)
        in_use = memory_in_use()
        begin = time.perf_counter()
        try:
            ended = subprocess.run(
                command, env=environment, timeout=max(until - time.time(), 1), capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"error": "ran past --minutes"}
        if not out.exists():
            print(ended.stdout[-2000:], ended.stderr[-8000:], sep="\n", file=sys.stderr, flush=True)
            return {"error": f"the process ended with {ended.returncode}: {ended.stderr[-600:]}"}
        return {**json.loads(out.read_text()), "wall_seconds": time.perf_counter() - begin, **in_use}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", choices=SHAPES, help="of every case; by default each has its own")
    parser.add_argument("--layers", type=int, help="of the shape; all by default")
    parser.add_argument("--length", type=int, help="tokens of a row; by default each case has its own")
    parser.add_argument("--long_rows", choices=("auto", "on", "off"), default="auto", help="of RopeSFTTrainer")
    parser.add_argument("--steps", type=int, default=2, help="that are timed")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True, help="gets a line a case")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    until = time.time() + 60 * args.minutes
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.cases:
        for n_gpus in args.gpus:
            case = CASES[name]
            if n_gpus == 1 and case.shared:
                continue
            line = {
                "case": name,
                "gpus": n_gpus,
                "engine": case.engine if n_gpus > 1 else "one process",
                "shape": args.shape or case.shape,
                "layers": args.layers,
                "length": length_of(case, args),
                "steps": args.steps,
                "gpu": device_name(torch.cuda.is_available()),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "trl": trl.__version__,
                **measure(name, n_gpus, args, until),
            }
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}, flush=True)


if __name__ == "__main__":
    main()
