"""Flex attention under the noise of a control of self-distillation: in its own tiles, and in the control's small ones.

Run:   python benchmarks/noise_attention.py [--tokens 32768] [--repeats 3] [--out FILE.jsonl]
       python benchmarks/noise_attention.py --quick        a few tokens, forward alone, which a CPU can do
Shape: one attention of SmolLM2-135M, nine heads of 64, causal, bf16.

A line for each case: milliseconds of the fastest forward and of the fastest backward, after one that compiles. `ratio`
is the forward over that of attention without noise. "as it was" draws its angles by the GPU's own cosine.
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eval_speed import setting, tell_line
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from rope_patch.losses import controls

HEADS, HEAD_DIM = 9, 64
# by name: whether there is noise, options of the kernel, whether the GPU's own cosine forms it
CASES: dict[str, tuple[bool, dict[str, int], bool]] = {
    "no noise": (False, {}, False),
    "noise, own tiles": (True, {}, False),
    "noise, small tiles": (True, controls.SMALL_TILES, False),
    "noise, as it was": (True, {}, True),
}


def milliseconds(begin: Any, end: Any, run: Any) -> tuple[Any, float]:
    """What `run` gives, and how long the GPU took."""
    begin.record()
    result = run()
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end)


def timed(n: int, noisy: bool, options: dict[str, int], own_cosine: bool, repeats: int) -> dict[str, float | None]:
    """Milliseconds of the fastest forward and backward; on a CPU a forward is run, and no time is given."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = (1, HEADS, n, HEAD_DIM)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=on_gpu) for _ in range(3))
    words = torch.randint(-(2**31), 2**31, (1, HEADS), dtype=torch.int32, device=device)  # seeds, [batch, heads]
    noise = controls.HashedNoise(words, torch.full((), 1.6, device=device))
    causal = create_block_mask(lambda row, head, one, other: one >= other, 1, None, n, n, device=device)
    ours = controls._cosine
    if own_cosine:
        controls._cosine = lambda turn: torch.cos(2 * math.pi * turn)
    torch.compiler.reset()  # a case must not run the kernel of another
    compiled = torch.compile(flex_attention) if on_gpu else flex_attention

    def forward() -> Any:
        return compiled(
            query,
            key,
            value,
            score_mod=(lambda score, *place: score + noise[place]) if noisy else None,
            block_mask=causal,
            kernel_options=dict(options),
        )

    try:
        output = forward()
        if not on_gpu:
            return {"forward_ms": None, "backward_ms": None}
        gradient = torch.randn_like(output)
        output.backward(gradient)
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            output, there = milliseconds(begin, end, forward)
            times.append((there, milliseconds(begin, end, partial(output.backward, gradient))[1]))
        return dict(zip(("forward_ms", "backward_ms"), map(min, zip(*times, strict=True)), strict=True))
    finally:
        controls._cosine = ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="file that gets the JSON lines as well")
    args = parser.parse_args()
    n = 256 if args.quick else args.tokens
    tell = partial(tell_line, out=args.out)
    tell(setting())
    plain = None
    for case, (noisy, options, own_cosine) in CASES.items():
        times = timed(n, noisy, options, own_cosine, args.repeats)
        plain = plain or times["forward_ms"]
        ratio = times["forward_ms"] / plain if plain and times["forward_ms"] else None
        tell({"case": case, "tokens": n, "options": options, **times, "ratio": ratio})


if __name__ == "__main__":
    main()
