"""Time and memory of relation_kl beside flash attention and the LinearARD authors' kernels, in one run.

Run: python benchmarks/relation_kl.py [--authors FOLDER] [--lengths 2048 4096 8192 16384] [--out FILE.json]

Forward and backward in bf16, batch 1, causal. Peers: attention forward and backward of the same shape through cuDNN and
through FlashAttention-2, both as torch ships them, FlashAttention-4 where it is installed, and with --authors the
kernels of LinearARD's authors from a checkout of their repository. Calls come from Python, and those of small shapes
take as long as Python does; so calls that were captured in a CUDA graph are timed, too: the kernels alone. Before
anything is timed, loss and gradient are compared with the dense float64 formula.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rope_kernels import relation_kl, relation_kl_ref

GIB = 1 << 30
# name -> heads, head_dim
SHAPES = {
    "H32 D128": (32, 128),
    "H8 D128 (Llama-3 keys)": (8, 128),
    "H9 D64 (SmolLM2 queries)": (9, 64),
    "H3 D64 (SmolLM2 keys)": (3, 64),
}


def inputs(n_heads: int, n: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A student that is a little off its teacher, as after a rescaling."""
    teacher = torch.randn(1, n_heads, n, head_dim, device="cuda", dtype=torch.bfloat16)
    student = (teacher + 0.3 * torch.randn_like(teacher)).requires_grad_()
    return student, teacher


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call."""
    return statistics.median(triton.testing.do_bench(run, warmup=50, rep=300, return_mode="all"))


def both(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> dict[str, float]:
    """Milliseconds of a forward, of forward and backward together, and of these in a CUDA graph."""
    weight = torch.rand_like(forward())

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(weight)

    with torch.no_grad():
        alone = milliseconds(forward)
    return {"forward_ms": alone, "both_ms": milliseconds(step), "both_graph_ms": milliseconds(captured(step))}


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """What replays the kernels of a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as captures need it: what is made at the first call is made outside of them
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def check(n_heads: int = 2, n: int = 1024, head_dim: int = 128) -> dict[str, float]:
    """Relative errors of loss and gradient against the formula in float64."""
    student, teacher = inputs(n_heads, n, head_dim)
    exact = student.detach().double().requires_grad_()
    seen = torch.ones(n, n, dtype=torch.bool, device="cuda").tril()
    loss, wanted = relation_kl(student, teacher).sum(), relation_kl_ref(exact, teacher.double(), seen).sum()
    loss.backward()
    wanted.backward()
    assert student.grad is not None and exact.grad is not None
    gradient = (student.grad.double() - exact.grad).norm() / exact.grad.norm()
    return {"loss": abs(loss.item() / wanted.item() - 1), "gradient": gradient.item()}


def attention(backend: SDPBackend, n_heads: int, n: int, head_dim: int) -> dict[str, float]:
    """Flash attention of the same shape."""
    q, k, v = (
        torch.randn(1, n_heads, n, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    with sdpa_kernel(backend):
        return both(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v])


def flash4(n_heads: int, n: int, head_dim: int) -> dict[str, float] | None:
    """FlashAttention-4 of the same shape, None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    q, k, v = (
        torch.randn(1, n, n_heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def forward() -> torch.Tensor:
        found = flash_attn_func(q, k, v, causal=True)
        return found[0] if isinstance(found, tuple) else found

    return both(forward, [q, k, v])


def memory(n: int, n_heads: int = 32, head_dim: int = 128) -> dict[str, float]:
    """Peak of forward and backward above the inputs, over inputs and gradient."""
    student, teacher = inputs(n_heads, n, head_dim)
    held = student.nbytes * 3
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    relation_kl(student, teacher).sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"n": n, "inputs_and_gradient_gib": held / GIB, "ratio": (held - student.nbytes + peak) / held}


def authors(folder: Path, n_heads: int, n: int, head_dim: int) -> dict[str, Any]:
    """The authors' kernels on the same inputs, which give the sum of rows: times, and how far the results are apart."""
    sys.path.insert(0, str(folder / "kernels"))
    from attention_KL.integration import attn_kl_align

    student, teacher = inputs(n_heads, n, head_dim)
    scale = head_dim**-0.5

    def forward() -> torch.Tensor:
        return attn_kl_align(student, student, teacher, teacher, sm_scale_s=scale, sm_scale_t=scale)

    ours, theirs = relation_kl(student, teacher).sum(), forward()
    (gradient,) = torch.autograd.grad(ours, student)
    (their_gradient,) = torch.autograd.grad(theirs, student)
    return {
        **both(forward, [student]),
        "loss_difference": abs(ours.item() / theirs.item() - 1),
        "gradient_difference": ((gradient - their_gradient).norm() / their_gradient.norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--memory-lengths", type=int, nargs="*", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--authors", type=Path, help="checkout of the authors' repository")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
        "error_against_float64": check(),
        "rows": [],
        "memory": [],
    }
    print("relative errors against float64:", facts["error_against_float64"], flush=True)
    for name, (n_heads, head_dim) in SHAPES.items():
        for n in args.lengths:
            student, teacher = inputs(n_heads, n, head_dim)
            row: dict[str, Any] = {"shape": name, "n": n}
            row["relation_kl"] = both(lambda s=student, t=teacher: relation_kl(s, t), [student])  # type: ignore[misc]
            row["cudnn"] = attention(SDPBackend.CUDNN_ATTENTION, n_heads, n, head_dim)
            row["flash2"] = attention(SDPBackend.FLASH_ATTENTION, n_heads, n, head_dim)
            fourth = flash4(n_heads, n, head_dim)
            if fourth is not None:
                row["flash4"] = fourth
            if args.authors and n_heads == 32 and n <= 8192:
                row["authors"] = authors(args.authors, n_heads, n, head_dim)
            facts["rows"].append(row)
            times = "  ".join(
                f"{k} {v['forward_ms']:.2f} / {v['both_ms']:.2f} ({v['both_graph_ms']:.2f}) ms"
                for k, v in row.items()
                if isinstance(v, dict)
            )
            print(f"{name:26}{n:7}  {times}", flush=True)
    for n in args.memory_lengths:
        facts["memory"].append(memory(n))
        print("memory", facts["memory"][-1], flush=True)
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
