"""Time and memory of the fused vocabulary loss beside TRL's chunked pair and Liger's, in one run.

Run: python benchmarks/linear_ce_kl.py [--shapes NAME ...] [--out FILE.json]

Forward and backward in bf16 of cross-entropy on one view and reverse KL of another to it, head trained and frozen.
Peers: TRL's chunked log-probabilities and chunked divergence, which its trainers add up, and liger-kernel's fused
linear cross-entropy and fused linear JSD where it is installed. Each is compared with float64 before it is timed.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from rope_kernels import linear_ce_kl, linear_ce_kl_ref

GIB = 1 << 30
# name -> rows, hidden, vocabulary
SHAPES = {
    "Llama-3-8B, 8192 rows": (8192, 4096, 128256),
    "Qwen3-1.7B, 16384 rows": (16384, 2048, 151936),
    "tiny": (96, 64, 1000),
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(n_rows: int, hidden: int, vocabulary: int, frozen: bool, device: str, dtype: torch.dtype) -> Inputs:
    """Hidden states of both views, the view a little off, a head and labels."""
    torch.manual_seed(0)
    standard = torch.randn(n_rows, hidden, device=device)
    view = standard + 0.2 * torch.randn_like(standard)
    weight = torch.randn(vocabulary, hidden, device=device) * hidden**-0.5
    labels = torch.randint(0, vocabulary, (n_rows,), device=device)
    standard, view, weight = (x.to(dtype).requires_grad_() for x in (standard, view, weight))
    return standard, view, weight.requires_grad_(not frozen), labels


def ours(standard: torch.Tensor, view: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    one = torch.full((len(labels),), 1 / len(labels), device=labels.device)
    return linear_ce_kl(standard, view, weight, labels, one, one)[0]


def trl(standard: torch.Tensor, view: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    log_p = ChunkedLogProbFunction.apply(standard, weight, None, labels, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE)[0]
    kl = ChunkedDivergenceFunction.apply(view, weight, None, standard.detach(), weight.detach(), None, 1.0)[0]
    return (kl - log_p).mean()


def liger(standard: torch.Tensor, view: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearJSD

    kl = LigerFusedLinearJSD(jsd_beta=1.0)(view, weight, standard.detach(), weight.detach(), None)
    return LigerFusedLinearCrossEntropyLoss()(weight, standard, labels) + kl


def peers() -> dict[str, Callable[..., torch.Tensor]]:
    found: dict[str, Callable[..., torch.Tensor]] = {"ours": ours, "trl": trl}
    try:
        version("liger-kernel")
    except PackageNotFoundError:
        return found
    return {**found, "liger": liger} if torch.cuda.is_available() else found


def errors(run: Callable[..., torch.Tensor], device: str) -> dict[str, float]:
    """Relative error of loss and of all gradients against float64, at a size whose logits fit."""
    given = inputs(512, 256, 4096, False, device, torch.bfloat16 if device == "cuda" else torch.float32)
    run(*given).backward()
    exact = tuple(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given)
    one = torch.full((512,), 1 / 512, device=device, dtype=torch.float64)
    wanted = linear_ce_kl_ref(*exact, one, one)
    wanted.backward()
    loss = run(*given).item() / wanted.item() - 1
    gaps = [(a.grad.double() - b.grad).norm() / b.grad.norm() for a, b in zip(given[:3], exact[:3], strict=True)]  # type: ignore[union-attr]
    return {"loss": abs(loss), "gradient": max(gap.item() for gap in gaps)}


def measure(run: Callable[..., torch.Tensor], given: Inputs) -> dict[str, float]:
    """Milliseconds of forward and backward, median, and memory above inputs at the peak."""

    def step() -> None:
        for x in given[:3]:
            x.grad = None
        run(*given).backward()

    step()
    for x in given[:3]:
        x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {"ms": statistics.median(times), "peak_gib": peak / GIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": {
            name: version(name) for name in ("torch", "triton", "trl") if device == "cuda" or name != "triton"
        },
        "errors": {name: errors(run, device) for name, run in peers().items()},
        "rows": [],
    }
    print("relative errors against float64:", facts["errors"], flush=True)
    if device != "cuda":
        return
    for shape in args.shapes:
        for frozen in (False, True):
            row: dict[str, Any] = {"shape": shape, "head": "frozen" if frozen else "trained"}
            for name, run in peers().items():
                row[name] = measure(run, inputs(*SHAPES[shape], frozen, device, torch.bfloat16))
                torch.cuda.empty_cache()
            facts["rows"].append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
