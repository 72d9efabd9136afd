"""Time and memory of losses on maps beside flash attention and the LinearARD authors' kernels, in one run.

Run: python benchmarks/relation_kl.py [--authors FOLDER] [--lengths 2048 4096 8192 16384] [--out FILE.json]
         [--operators relation_kl attention_map_kl relation_mse] [--shapes NAME ...] [--documents 1 8] [--any-gpu]
     python benchmarks/relation_kl.py --quick        a tiny shape, which a CPU can do in seconds

Forward and backward in bf16 (on a CPU float32), batch 1, causal. Each JSON line is there as soon as it is measured.
`ratio` is our time of forward and backward over that of each peer. Peers of relation_kl and attention_map_kl are
attention forward and backward of the same shape through cuDNN and through FlashAttention-2, both as torch ships them,
and FlashAttention-4 where it is installed. With --authors relation_kl also stands beside the kernels of LinearARD's
authors, from a checkout of their repository. relation_mse is plain torch; it stands beside relation_kl, for which it
is the control, and beside its twin where dense maps fit. Calls come from Python, and those of small shapes take as
long as Python does; so calls that were captured in a CUDA graph are timed, too: the kernels alone. `over_graph` is our
time from Python over that. With --documents above 1 a row is packed with so many documents of one length, and peers
have each of them in a row of its own; beside them stand our kernels for any GPU, and attention within documents by
torch's varlen_attn, which is FlashAttention, and by its flex_attention. Before anything is timed, loss and gradients
are compared with the dense float64 formula.
"""

import argparse
import inspect
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eval_speed import setting
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rope_kernels import Visibility, attention_map_kl, attention_map_kl_ref, relation_kl, relation_kl_ref, relation_mse
from rope_kernels.row_kl import custom_op
from rope_kernels.row_kl.reference import relation_mse_ref

GIB = 1 << 30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# name -> heads, heads of keys, head_dim; relations are of heads alone
SHAPES = {
    "H32 D128": (32, 8, 128),
    "H8 D128 (Llama-3 keys)": (8, 8, 128),
    "H9 D64 (SmolLM2 queries)": (9, 3, 64),
    "H3 D64 (SmolLM2 keys)": (3, 3, 64),
}
TINY = {"H4 D32": (4, 2, 32)}
DENSE_LENGTH = 4096  # the longest row whose dense maps, their gradients and copies of 32 heads fit one GPU


@dataclass(frozen=True)
class Operator:
    """An operator on maps and its twin; both take student and teacher, each a tuple of X or of Q and K."""

    run: Callable[..., torch.Tensor]
    twin: Callable[..., torch.Tensor]
    n_sides: int  # tensors of a student: X alone, or Q and K
    in_graphs: bool = True


OPERATORS = {
    "relation_kl": Operator(relation_kl, relation_kl_ref, 1),
    "attention_map_kl": Operator(attention_map_kl, attention_map_kl_ref, 2),
    # checkpoints ask for the state of the random generator, which a capture refuses
    "relation_mse": Operator(relation_mse, relation_mse_ref, 1, in_graphs=False),
}
Inputs = tuple[list[torch.Tensor], list[torch.Tensor]]


def inputs(shape: tuple[int, int, int], n: int, n_sides: int = 1) -> Inputs:
    """A student that is a little off its teacher, as after a rescaling."""
    *heads, head_dim = shape  # heads of queries, heads of keys
    teacher = [torch.randn(1, h, n, head_dim, device=DEVICE, dtype=DTYPE) for h in heads[:n_sides]]
    return [(x + 0.3 * torch.randn_like(x)).requires_grad_() for x in teacher], teacher


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call."""
    if DEVICE == "cuda":
        import triton

        return statistics.median(triton.testing.do_bench(run, warmup=50, rep=300, return_mode="all"))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def both(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], in_graphs: bool = True) -> dict[str, float]:
    """Milliseconds of a forward, of forward and backward together, and of these in a CUDA graph."""
    # the gradient of each row's KL, as losses weigh rows
    weight = torch.rand_like(forward())

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(weight)

    with torch.no_grad():
        alone = milliseconds(forward)
    times = {"forward_ms": alone, "both_ms": milliseconds(step)}
    return {**times, "both_graph_ms": milliseconds(captured(step))} if in_graphs and DEVICE == "cuda" else times


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


def visibility(n: int, documents: int) -> Visibility:
    """Of a row of n tokens, causal, in documents of one length."""
    if documents == 1:
        return Visibility(True)
    return Visibility.of_documents(torch.arange(n, device=DEVICE)[None] // (n // documents))


def check(
    operator: Operator, documents: int, shape: tuple[int, int, int] = (2, 1, 128), n: int = 1024
) -> dict[str, float]:
    """Relative errors of loss and gradients against the formula in float64, the largest of all gradients."""
    student, teacher = inputs(shape, n, operator.n_sides)
    exact = [x.detach().double().requires_grad_() for x in student]
    document = torch.arange(n, device=DEVICE) // (n // documents)
    seen = (document[:, None] == document).tril()
    loss = operator.run(*student, *teacher, visibility=visibility(n, documents)).sum()
    truth = operator.twin(*exact, *(x.double() for x in teacher), seen).sum()
    loss.backward()
    truth.backward()
    gaps = [(x.grad.double() - y.grad).norm() / y.grad.norm() for x, y in zip(student, exact, strict=True)]  # type: ignore[union-attr]
    return {"loss": abs(loss.item() / truth.item() - 1), "gradient": max(gap.item() for gap in gaps)}


def attention(backend: SDPBackend | None, shape: tuple[int, int, int], n: int, documents: int) -> dict[str, float]:
    """Attention of as many heads of queries, keys and values as there are maps; None: what torch chooses."""
    n_heads, _, head_dim = shape
    rows = (documents, n_heads, n // documents, head_dim)
    q, k, v = (torch.randn(rows, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    if backend is None:
        return both(forward, [q, k, v])
    with sdpa_kernel(backend):
        return both(forward, [q, k, v])


def flash4(shape: tuple[int, int, int], n: int, documents: int) -> dict[str, float] | None:
    """FlashAttention-4 of the same shape, None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    n_heads, _, head_dim = shape
    rows = (documents, n // documents, n_heads, head_dim)
    q, k, v = (torch.randn(rows, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        attended = flash_attn_func(q, k, v, causal=True)
        return attended[0] if isinstance(attended, tuple) else attended

    return both(forward, [q, k, v])


def within_documents(shape: tuple[int, int, int], n: int, documents: int) -> dict[str, dict[str, float]]:
    """Attention within documents, by flex_attention and, where this torch has it, by varlen_attn."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n_heads, _, head_dim = shape
    length = n // documents
    q, k, v = (torch.randn(1, n_heads, n, head_dim, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3))
    mask = create_block_mask(
        lambda b, h, query, key: (key <= query) & (query // length == key // length), None, None, n, n, device=DEVICE
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    times = {"flex": both(lambda: compiled(q, k, v, block_mask=mask), [q, k, v], in_graphs=False)}
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return times
    # the argument changed its name
    options = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in options else {"window_size": (-1, 0)}
    rows = [torch.randn(n, n_heads, head_dim, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    borders = torch.arange(0, n + 1, length, dtype=torch.int32, device=DEVICE)
    times["varlen"] = both(lambda: varlen_attn(*rows, borders, borders, length, length, **causal), rows, False)
    return times


def any_gpu(run: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> dict[str, float]:
    """Our kernels for every other GPU."""
    chosen = custom_op.runs_on_hopper
    custom_op.runs_on_hopper = lambda *_: False
    try:
        return both(run, leaves)
    finally:
        custom_op.runs_on_hopper = chosen


def memory(n: int, shape: tuple[int, int, int] = (32, 8, 128)) -> dict[str, Any]:
    """Peak of relation_kl's forward and backward above the inputs, over inputs and gradient."""
    (student,), (teacher,) = inputs(shape, n)
    held = student.nbytes * 3  # student, teacher, and the gradient
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    relation_kl(student, teacher).sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"n": n, "inputs_and_gradient_gib": held / GIB, "ratio": (held - student.nbytes + peak) / held}


def authors(folder: Path, shape: tuple[int, int, int], n: int) -> dict[str, Any]:
    """The authors' kernels on the same inputs, which give the sum of rows: times, and how far the results are apart."""
    sys.path.insert(0, str(folder / "kernels"))
    from attention_KL.integration import attn_kl_align

    (student,), (teacher,) = inputs(shape, n)
    scale = shape[-1] ** -0.5

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


def peers(
    name: str, shape: tuple[int, int, int], n: int, documents: int, folder: Path | None
) -> dict[str, dict[str, Any]]:
    """Times of whatever does comparable work at the shape."""
    if name == "relation_mse":
        student, teacher = inputs(shape, n)
        which = visibility(n, documents)
        times = {"relation_kl": both(lambda: relation_kl(*student, *teacher, visibility=which), student)}
        if n <= DENSE_LENGTH:
            seen = which.mask(slice(0, n), slice(0, n), student[0].device)
            times["twin"] = both(lambda: relation_mse_ref(*student, *teacher, seen), student)
        return times
    if DEVICE == "cpu":
        return {"sdpa": attention(None, shape, n, documents)}
    times = {
        "cudnn": attention(SDPBackend.CUDNN_ATTENTION, shape, n, documents),
        "flash2": attention(SDPBackend.FLASH_ATTENTION, shape, n, documents),
    }
    fourth = flash4(shape, n, documents)
    if fourth is not None:
        times["flash4"] = fourth
    if folder and name == "relation_kl" and documents == 1 and shape[0] == 32 and n <= 8192:
        times["authors"] = authors(folder, shape, n)
    return times


def measured(
    name: str, shape_name: str, shape: tuple[int, int, int], n: int, documents: int, folder: Path | None
) -> dict[str, Any]:
    """A row of results: our times under the operator's name, those of peers beside it, and our time over theirs."""
    operator = OPERATORS[name]
    student, teacher = inputs(shape, n, operator.n_sides)
    which = visibility(n, documents)
    ours = both(lambda: operator.run(*student, *teacher, visibility=which), student, operator.in_graphs)
    others = peers(name, shape, n, documents, folder)
    if documents > 1 and DEVICE == "cuda" and name != "relation_mse":
        others["any_gpu"] = any_gpu(lambda: operator.run(*student, *teacher, visibility=which), student)
        others |= within_documents(shape, n, documents)
    ratio = {peer: ours["both_ms"] / times["both_ms"] for peer, times in others.items()}
    row = {"operator": name, "shape": shape_name, "n": n, "documents": documents, name: ours, **others, "ratio": ratio}
    if "both_graph_ms" in ours:
        row["over_graph"] = ours["both_ms"] / ours["both_graph_ms"]
    return row if operator.n_sides == 1 else {**row, "n_kv_heads": shape[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--documents", type=int, nargs="+", default=[1], help="in a row, each of one length")
    parser.add_argument("--memory-lengths", type=int, nargs="*", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--authors", type=Path, help="checkout of the authors' repository")
    parser.add_argument("--any-gpu", action="store_true", help="on Hopper, too, the kernels that every other GPU runs")
    parser.add_argument("--quick", action="store_true", help="rows of 128 tokens of a tiny shape, and no memory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = TINY if args.quick else {name: SHAPES[name] for name in args.shapes}
    if args.quick:
        args.lengths, args.memory_lengths, args.authors = [128], [], None
    elif DEVICE == "cpu":
        parser.error("without a CUDA GPU only --quick can be measured")
    if args.any_gpu:
        custom_op.runs_on_hopper = lambda *_: False
    facts: dict[str, Any] = {
        "kernels": "any GPU" if args.any_gpu else "of this GPU",
        **{key: value for key, value in setting().items() if key != "line"},
        "dtype": str(DTYPE).removeprefix("torch."),
        "error_against_float64": {name: check(OPERATORS[name], max(args.documents)) for name in args.operators},
        "rows": [],
        "memory": [],
    }
    print(json.dumps({key: value for key, value in facts.items() if value}), flush=True)
    for name in args.operators:
        for shape_name, shape in shapes.items():
            for n, documents in itertools.product(args.lengths, args.documents):
                facts["rows"].append(measured(name, shape_name, shape, n, documents, args.authors))
                print(json.dumps(facts["rows"][-1]), flush=True)
    for n in args.memory_lengths:
        facts["memory"].append(memory(n))
        print(json.dumps({"memory": facts["memory"][-1]}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
