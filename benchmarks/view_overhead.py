"""Time of a forward or of a training step under each view over that of the unpatched model, both in one run.

Run:   python benchmarks/view_overhead.py [--lengths 8192 32768] [--layers 32] [--out FILE.json]
       python benchmarks/view_overhead.py --step --shape llama-3.2-1b --lengths 2048 8192 --views posaug [--rounds 40]
Shape: random weights in bf16, batch 1. A forward has no KV cache, no gradients and logits of the last token only; a
step is forward and loss of all tokens, backward, and fused AdamW, in training mode.
Each round times an unpatched and a patched one, in an order that changes from round to round, so that a drift of the
clock and what a forward leaves behind meet both; the median over rounds of their ratio is what counts.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import rope_patch
from rope_patch import patch_model, unpatch_model
from rope_patch.base.environment import device_name

VIEWS = ["standard", "skip", "cyclic", "dilation", "posaug", "nope", "compose"]


SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
LLAMA3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


LLAMA32_1B = {
    **LLAMA3_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SHAPES = {"llama-3-8b": LLAMA3_8B, "llama-3.2-1b": LLAMA32_1B}


def build(shape: str, layers: int | None) -> LlamaForCausalLM:
    changes = {} if layers is None else {"num_hidden_layers": layers}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = LlamaConfig(**{**SHAPES[shape], **changes})
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(model: LlamaForCausalLM, ids: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> float:
    """Wall time of a forward, or of a step where there is an optimizer, in ms: the hooks' work on the CPU counts."""
    synchronize()
    begin = time.perf_counter()
    if optimizer is None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
    else:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def measure(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer | None, views: list[str], seq_len: int, rounds: int
) -> list[dict[str, object]]:
    ids = torch.randint(0, model.config.vocab_size, (1, seq_len), device=model.device)
    rows = []
    for view in views:
        options = {"views": [{"view": "skip"}, {"view": "posaug"}]} if view == "compose" else {}
        plain: list[float] = []
        patched: list[float] = []
        for round_number in range(-2, rounds):
            times = {}
            for is_patched in (False, True) if round_number % 2 else (True, False):  # each is second in turn
                unpatch_model(model)
                if is_patched:
                    patch_model(model, view, when="always", **options)
                with torch.no_grad():
                    model(ids[:, :16], use_cache=False, logits_to_keep=1)  # what a patch does in its first forward only
                times[is_patched] = milliseconds(model, ids, optimizer)
            if round_number >= 0:  # the first rounds warm up
                plain.append(times[False])
                patched.append(times[True])
        unpatch_model(model)
        ratios = [b / a for a, b in zip(plain, patched, strict=True)]
        # what the unpatched model differs by from itself: the noise that the ratio is to be read against
        null = [b / a for a, b in zip(plain, plain[1:], strict=False)]
        rows.append(
            {
                "view": view,
                "seq_len": seq_len,
                "unpatched_ms": statistics.median(plain),
                "patched_ms": statistics.median(patched),
                "overhead_percent": 100 * (statistics.median(ratios) - 1),
                "noise_percent": 100 * (statistics.quantiles(null, n=4)[2] - statistics.quantiles(null, n=4)[0]) / 2,
                "rounds": rounds,
            }
        )
        print(
            f"{view:9} {seq_len:6} tokens  unpatched {rows[-1]['unpatched_ms']:8.2f} ms  patched "
            f"{rows[-1]['patched_ms']:8.2f} ms  overhead {rows[-1]['overhead_percent']:+.3f} %  "
            f"(noise +-{rows[-1]['noise_percent']:.3f} %)",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="default: those of the shape")
    parser.add_argument("--step", action="store_true", help="time training steps in place of forwards")
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=VIEWS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    model = build(args.shape, args.layers)
    optimizer = None
    if args.step:
        # so small a rate that random weights stay what they are
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-8, weight_decay=0.0, fused=True)
    rows = [row for seq_len in args.lengths for row in measure(model, optimizer, args.views, seq_len, args.rounds)]
    what = "training step with fused AdamW" if args.step else "forward without gradients"
    result = {
        "gpu": device_name(torch.cuda.is_available()),
        "shape": f"{args.shape}, {model.config.num_hidden_layers} layers, batch 1, bf16, sdpa, random weights, {what}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rope_patch": rope_patch.__version__,
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
