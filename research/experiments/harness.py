"""What the studies share beside their arms: arguments, runs that are not done twice, and training of one arm."""

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint

from compiled import compiled_tokenwise
from result_lines import Deadline, add_line, read_lines, share, versions
from run_queue import GPU_SHARE
from trl_ext import RopeSFTConfig, RopeSFTTrainer
from trl_ext.config import LONG_DOCUMENTS

Line = dict[str, Any]
FIXED = ("output_dir", "save_strategy", "seed")  # fields of RopeSFTConfig that `train` sets
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda" and GPU_SHARE in os.environ:  # by run_queue.py, to one of several processes of a GPU
    torch.cuda.set_per_process_memory_fraction(float(os.environ[GPU_SHARE]))


def study_parser(doc: str | None, out: str, seeds: Sequence[int] = (0,)) -> argparse.ArgumentParser:
    """The arguments that all studies take: which runs, for how long, and where their results are."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="what is compared; with --table, what is shown")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--part", default="0/1", help="K/N: every N-th run from the K-th, for N processes")
    parser.add_argument(
        "--minutes", type=minutes_from_now, default=Deadline(None), dest="deadline", help="in which runs are to end"
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="gets a line a result; what it has is not redone")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of such files, and train nothing")
    return parser


def add_training_arguments(parser: argparse.ArgumentParser, *fixed: str) -> None:
    """--override, but for fields that are `fixed`, and --compile, for `train`."""
    what = "RopeSFTConfig fields of every run, as JSON"
    parser.add_argument("--override", type=fields_but(*fixed), default={}, help=what)
    parser.add_argument("--compile", action="store_true", help="compile norms and MLPs while training")


def fields_but(*fixed: str) -> Callable[[str], dict[str, Any]]:
    """Reads fields of RopeSFTConfig as JSON, and refuses those that `train` or the study sets."""

    def fields(text: str) -> dict[str, Any]:
        specification = json.loads(text)
        if taken := sorted(specification.keys() & {*FIXED, *fixed}):
            raise argparse.ArgumentTypeError(f"{', '.join(taken)} cannot be overridden: the study sets what runs have")
        return specification

    return fields


def minutes_from_now(minutes: str) -> Deadline:
    """The deadline of --minutes."""
    return Deadline(float(minutes))


def show(args: argparse.Namespace, table: Callable[[list[Line]], str], plot: Callable[..., list[Path]] | None) -> None:
    """Print the table of the files of --table, and draw them into --plot; of --arms, and what they are measured by."""
    lines = read_lines(*args.table)
    if args.arms:
        lines = [line for line in lines if line.get("arm", line.get("method")) in (*args.arms, "native")]
    print(table(lines))
    if plot is not None and args.plot:
        print(*plot(lines, path=args.plot))


def require(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End with the usage if an argument without which nothing is trained is missing."""
    if missing := [name for name in names if getattr(args, name) is None]:
        parser.error(f"without --table these are needed: {', '.join(missing)}")


def chosen(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    known: Iterable[str],
    default: Iterable[str] | None = None,
) -> list[str]:
    """--arms, or `default`, or all that are known; end with the usage if one is not."""
    names = list(known)
    if unknown := [name for name in args.arms or () if name not in names]:
        parser.error(f"unknown arms {', '.join(unknown)}; known: {', '.join(names)}")
    return args.arms or list(names if default is None else default)


@dataclass(frozen=True)
class Run:
    """What gives one line of results, or several.

    Args:
        name: as it is printed.
        key: fields that its lines have and no other run's; the last of several lines has them all.
        results: does it; each result becomes a line as soon as it is there.
        alike: fields of the lines of runs that take as long; None for a run that ends by itself when time is up.
    """

    name: str
    key: Mapping[str, Any]
    results: Callable[[], Iterable[Line]]
    alike: Mapping[str, Any] | None = None

    def seconds(self, lines: Sequence[Line]) -> float:
        """The longest that runs alike took, or all runs where there are none alike."""
        if self.alike is None:
            return 0.0
        timed = [line for line in lines if "seconds" in line]
        alike = [line for line in timed if has(line, self.alike)]
        return max((line["seconds"] for line in alike or timed), default=0.0)


def has(line: Line, fields: Mapping[str, Any]) -> bool:
    """Whether a line has these fields, with these values."""
    return all(name in line and line[name] == value for name, value in fields.items())


def carry_out(runs: Sequence[Run], args: argparse.Namespace, shown: Callable[[Line], str]) -> None:
    """Do those of this part of `runs` that --out does not have, in order, and add their lines with time and versions.

    None begins that would not be through in time, nor any behind it: with seeds outermost what is missing is whole
    comparisons.

    Args:
        runs: of all parts.
        args: of `study_parser`.
        shown: what is printed of a line.

    Raises:
        SystemExit: runs failed; their tracebacks are printed, and the others are done.
    """
    failed = []
    for run in share(runs, args.part):
        known = read_lines(args.out)
        if any(has(line, run.key) for line in known):
            continue
        needed = run.seconds(known)
        if not args.deadline.leaves(needed):
            print(f"{run.name}: not begun, it would take {needed:.0f} s", flush=True)
            break
        begin = time.perf_counter()
        try:
            for result in run.results():
                line = {**run.key, **result, "seconds": time.perf_counter() - begin, **versions()}
                add_line(args.out, line)
                print(f"{run.name}  {shown(line)}  {line['seconds']:.0f} s", flush=True)
        except Exception:  # the others are still of use
            traceback.print_exc()
            failed.append(run.name)
        gc.collect()  # what is patched holds on to itself
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def load(folder: str | Path, attention: str | None = None) -> Any:
    """float32 weights on the GPU if there is one: what is trained is small steps on them, in bf16 autocast.

    Args:
        folder: of the checkpoint.
        attention: implementation, None for Transformers' choice.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.to(DEVICE)


def short_texts_at_once(model: Any) -> int:
    """Short texts read together: their logits are held in float32 three times, 10 GiB for BoolQ's longest passages."""
    return min(64, 2**20 // int(model.config.get_text_config().vocab_size))


def autocast(model: Any) -> torch.autocast:
    """bf16 products on a GPU, as in training."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")


@contextmanager
def kept_folder(name: str, checkpoints: Path | None) -> Iterator[Path]:
    """A folder for what a run trains: in `checkpoints` it stays until the run is through, so that it can go on."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(checkpoints or scratch) / name.replace("/", " by ")
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def train(
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    fields: Mapping[str, Any],
    seed: int,
    compiled: bool = False,
    folder: Path | None = None,
    **more: Any,
) -> RopeSFTTrainer:
    """Train in place; the trainer as it ends.

    Args:
        model: float32 weights.
        tokenizer: of the model.
        rows: to train on.
        fields: of RopeSFTConfig.
        seed: of the trainer.
        compiled: compile norms and MLPs.
        folder: gets eight checkpoints on the way, of which the last is kept and gone on from; None for none.
        more: further arguments of RopeSFTTrainer.
    """
    gpu = DEVICE == "cuda"
    common = {"bf16": gpu, "use_cpu": not gpu, "logging_steps": 8, "report_to": [], "disable_tqdm": True}
    saves: dict[str, Any] = {"save_strategy": "no"}
    if folder is not None:
        saves = {"save_strategy": "steps", "save_steps": max(fields["max_steps"] // 8, 1), "save_total_limit": 1}
    last = get_last_checkpoint(folder) if folder is not None and folder.is_dir() else None
    with tempfile.TemporaryDirectory() as scratch:
        output = str(folder or scratch)
        config = RopeSFTConfig(**{**LONG_DOCUMENTS, **common, **fields, **saves, "seed": seed, "output_dir": output})
        trainer = RopeSFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer, **more)
        with compiled_tokenwise(trainer.model, compiled):
            trainer.train(resume_from_checkpoint=last)
    return trainer


def logged(trainer: RopeSFTTrainer, *fields: str) -> list[dict[str, Any]]:
    """What was logged of losses: these fields, or all."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: entry[k] for k in fields if k in entry} for entry in entries] if fields else entries
