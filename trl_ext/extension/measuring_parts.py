"""Measure a model on several GPUs: a process for each measures some parts, and leaves them in the cache of all."""

import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rope_patch.eval import EvalPlan
from rope_patch.eval.measures.ruler import tasks_at_once

from ..memory.size import ModelSize
from .duration import forward_operations
from .facts import ModelFacts
from .measuring import measure
from .messages import others_quiet
from .texts import Texts

# as `rope-patch` does, it hides that bitsandbytes lacks a kernel that nothing here uses
_MAIN = f"""
import logging
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
from {__name__} import main
main()
"""


@dataclass(frozen=True)
class Part:
    """What one process measures without the others.

    Args:
        plan: of it.
        length: tokens of a row or prompt.
        count: rows or prompts.
    """

    plan: EvalPlan
    length: int
    count: int


def parts_of(plan: EvalPlan) -> list[Part]:
    """The rows, each length of prompts, and of RULER the tasks that are asked together at a length."""
    parts, prompts = [], {"passkey": plan.trials * len(plan.depths), "several": plan.trials}
    for name in plan.measures:
        one = replace(plan, measures=(name,))
        if name == "cliff":
            parts.append(Part(one, plan.length, plan.n_rows))
        elif name == "ruler":
            tasks = plan.ruler_tasks or ()
            for n in plan.ruler_lengths or ():
                at_once = tasks_at_once(n, plan.ruler_samples)
                for asked in (tasks[first : first + at_once] for first in range(0, len(tasks), at_once)):
                    of_tasks = replace(one, ruler_lengths=(n,), ruler_tasks=asked)
                    parts.append(Part(of_tasks, n, len(asked) * plan.ruler_samples))
        else:
            parts += [Part(replace(one, lengths=(n,)), n, prompts[name]) for n in plan.lengths]
    return parts


def operations_of(size: ModelSize, part: Part) -> float:
    """Floating-point operations of reading a part."""
    return part.count * forward_operations(size, part.length)


def shares_of(parts: Sequence[Part], n: int, cost: Callable[[Part], float]) -> list[list[Part]]:
    """The parts divided among `n` processes, the costliest first, each to the one that has least to do."""
    shares: list[list[Part]] = [[] for _ in range(n)]
    for part in sorted(parts, key=cost, reverse=True):
        min(shares, key=lambda share: sum(map(cost, share))).append(part)
    return shares


def measure_parts(
    label: str,
    load: Callable[[torch.dtype], Any],
    facts: ModelFacts,
    shares: Sequence[Sequence[Part]],
    texts: Texts,
    device: str,
    cache: Path,
) -> None:
    """Measure each share in a process of its own, on a GPU of its own, and store the results in `cache`.

    Args:
        label: of the model.
        load: as of `measure`, of a function that `pickle` knows by its name.
        facts: of the model.
        shares: of the parts.
        texts: the held-out ones are read.
        device: "cuda", or "cpu" for all processes.
        cache: a folder.

    Raises:
        ChildProcessError: a process has failed, and has printed why.
    """
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank, share in enumerate(shares):
            job = Path(folder, f"{rank}.pickle")
            job.write_bytes(pickle.dumps((label, load, facts, share, replace(texts, train=[]), device, cache)))
            quiet = {"TQDM_DISABLE": "1"} if rank else {}  # bars would be drawn over each other
            command = [sys.executable, "-c", _MAIN, str(job), str(rank)]
            processes.append(subprocess.Popen(command, env={**os.environ, **quiet}))
        try:
            statuses = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(statuses):
        raise ChildProcessError(f"processes that measure have ended with status {statuses}, for the reason above.")


def main() -> None:
    """Measure the share that a file has."""
    file, rank = sys.argv[1:]
    with others_quiet():
        label, load, facts, share, texts, device, cache = pickle.loads(Path(file).read_bytes())
        if device == "cuda":
            torch.cuda.set_device(int(rank))
        load_once = functools.cache(load)
        for part in share:
            measure(label, load_once, facts, part.plan, texts, device, cache)
