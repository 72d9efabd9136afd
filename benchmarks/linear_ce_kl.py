"""Time and memory of the losses of the vocabulary beside TRL's chunked ones and Liger's, in one run.

Run: python benchmarks/linear_ce_kl.py [--operators linear_ce_kl linear_ce_rows] [--shapes NAME ...] [--out FILE.json]
     python benchmarks/linear_ce_kl.py --quick        a tiny shape, which a CPU can do in seconds

In bf16 (on a CPU float32), head trained and frozen. linear_ce_kl is cross-entropy on one view and reverse KL of
another to it, forward and backward. linear_ce_rows is cross-entropy alone, forward. Peers: TRL's chunked
log-probabilities and chunked divergence, which its trainers add up, and liger-kernel's fused linear cross-entropy and
fused linear JSD where it is installed. Each is compared with float64 before it is timed. Each JSON line is there as
soon as it is measured; its `ratio` is our time over that of each peer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from eval_speed import setting
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from rope_kernels import linear_ce_kl, linear_ce_kl_ref, linear_ce_rows, linear_ce_rows_ref

GIB = 1 << 30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# name -> rows, hidden, vocabulary
SHAPES = {
    "Llama-3-8B, 8192 rows": (8192, 4096, 128256),
    "Qwen3-1.7B, 16384 rows": (16384, 2048, 151936),
    "tiny": (96, 64, 1000),
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def inputs(n_rows: int, hidden: int, vocabulary: int, frozen: bool) -> Inputs:
    """Hidden states of both views, the view a little off, a head and labels."""
    torch.manual_seed(0)
    standard = torch.randn(n_rows, hidden, device=DEVICE)
    view = standard + 0.2 * torch.randn_like(standard)  # [n_rows, hidden], both
    # logits with a deviation of 1
    weight = torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5
    labels = torch.randint(0, vocabulary, (n_rows,), device=DEVICE)
    standard, view, weight = (x.to(DTYPE).requires_grad_() for x in (standard, view, weight))
    return standard, view, weight.requires_grad_(not frozen), labels


def one_of_each(labels: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Weights of rows that make a sum their mean."""
    return torch.full((len(labels),), 1 / len(labels), device=labels.device, dtype=dtype)


def trl_ce(standard: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -ChunkedLogProbFunction.apply(standard, weight, None, labels, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE)[0]


def trl_kl(student: torch.Tensor, teacher: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ChunkedDivergenceFunction.apply(student, weight, None, teacher.detach(), weight.detach(), None, 1.0)[0]


def liger_kl(student: torch.Tensor, teacher: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=1.0)(student, weight, teacher.detach(), weight.detach(), None)


def liger_ce(standard: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, standard, labels)


# operator -> name -> mean loss; "twin" is what the others are compared with, in float64
OPERATORS: dict[str, dict[str, Loss]] = {
    "linear_ce_kl": {
        "ours": lambda s, v, w, y: linear_ce_kl(s, v, w, y, one_of_each(y), one_of_each(y))[0],
        "twin": lambda s, v, w, y: linear_ce_kl_ref(s, v, w, y, one_of_each(y, s.dtype), one_of_each(y, s.dtype)),
        "trl": lambda s, v, w, y: (trl_kl(v, s, w) + trl_ce(s, w, y)).mean(),
        "liger": lambda s, v, w, y: liger_ce(s, w, y) + liger_kl(v, s, w),
    },
    "linear_ce_rows": {
        "ours": lambda s, v, w, y: linear_ce_rows(s, w, y).mean(),
        "twin": lambda s, v, w, y: linear_ce_rows_ref(s, w, y).mean(),
        "trl": lambda s, v, w, y: trl_ce(s, w, y).mean(),
        "liger": lambda s, v, w, y: liger_ce(s, w, y),
    },
}
FORWARD_ALONE = {"linear_ce_rows"}


def timed(operator: str) -> dict[str, Loss]:
    """What can be timed here: ours and its peers, Liger's where it is installed, on a GPU."""
    losses = {name: run for name, run in OPERATORS[operator].items() if name != "twin"}
    try:
        version("liger-kernel")
    except PackageNotFoundError:
        has_liger = False
    else:
        has_liger = DEVICE == "cuda"
    return losses if has_liger else {name: run for name, run in losses.items() if name != "liger"}


def errors(operator: str, run: Loss) -> dict[str, float]:
    """Relative error of loss and of all gradients against float64, at a size whose logits fit."""
    half = inputs(*((512, 256, 4096) if DEVICE == "cuda" else SHAPES["tiny"]), False)
    exact = tuple(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in half)
    loss, truth = run(*half), OPERATORS[operator]["twin"](*exact)  # type: ignore[arg-type]
    gap = {"loss": abs(loss.item() / truth.item() - 1)}
    if operator in FORWARD_ALONE:
        return gap
    loss.backward()
    truth.backward()
    pairs = [(a.grad, b.grad) for a, b in zip(half[:3], exact[:3], strict=True) if b.grad is not None]
    gaps = [(a.double() - b).norm() / b.norm() for a, b in pairs]  # type: ignore[union-attr]
    return {**gap, "gradient": max(gap.item() for gap in gaps)}


def milliseconds(step: Callable[[], None]) -> float:
    """Median time of seven calls."""
    times = []
    for _ in range(7):
        if DEVICE == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def measure(operator: str, run: Loss, arguments: Inputs) -> dict[str, float]:
    """Milliseconds, median, and on a GPU memory above inputs at the peak."""

    def forget() -> None:
        for x in arguments[:3]:
            x.grad = None

    def step() -> None:
        forget()
        if operator in FORWARD_ALONE:
            with torch.no_grad():
                run(*arguments)
        else:
            run(*arguments).backward()

    step()  # compiles and tunes
    if DEVICE == "cpu":
        return {"ms": milliseconds(step)}
    forget()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"ms": milliseconds(step), "peak_gib": peak / GIB}


def measured(operator: str, shape: str, frozen: bool) -> dict[str, Any]:
    """A row of results: ours, each peer, and our time over theirs."""
    row: dict[str, Any] = {"operator": operator, "shape": shape, "head": "frozen" if frozen else "trained"}
    losses = timed(operator)
    for name, run in losses.items():
        row[name] = measure(operator, run, inputs(*SHAPES[shape], frozen))
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    row["ratio"] = {name: row["ours"]["ms"] / row[name]["ms"] for name in losses if name != "ours"}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--quick", action="store_true", help="the tiny shape alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.shapes = ["tiny"]
    elif DEVICE == "cpu":
        parser.error("without a CUDA GPU only --quick can be measured")
    facts: dict[str, Any] = {
        **{key: value for key, value in setting().items() if key != "line"},
        "dtype": str(DTYPE).removeprefix("torch."),
        "errors": {o: {name: errors(o, run) for name, run in timed(o).items()} for o in args.operators},
        "rows": [],
    }
    print(json.dumps({key: value for key, value in facts.items() if value}), flush=True)
    for operator in args.operators:
        for shape in args.shapes:
            for frozen in (True,) if operator in FORWARD_ALONE else (False, True):
                facts["rows"].append(measured(operator, shape, frozen))
                print(json.dumps(facts["rows"][-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
