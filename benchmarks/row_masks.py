"""Training on rows with windows, or with several documents: masks of n x n, as Transformers makes them, beside none.

Run:   python benchmarks/row_masks.py [--out FILE.jsonl] [--tokens 1024 2048 4096 8192 32768] [--repeats 3]
       python benchmarks/row_masks.py --quick        tiny layers, which a CPU can do
Shape: the decoder, without its head, of Gemma-3-270M (15 of 18 layers have a window of 512) on rows of one document,
and of Llama-3.2-1B on rows of documents of 512 and of 128 tokens; random weights, bf16, SDPA, layers checkpointed.

A line for each shape, length of rows and of documents: seconds of the fastest forward and backward and GiB at its peak,
with masks and without. `ratio` is the time with masks over that without. What does not fit has no figures.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eval_speed import measured, setting, tell_line
from extension_memory import SHAPES
from transformers import AutoConfig, AutoModel

from rope_patch.attention.rows import MaskFreeRows

# shape, tokens of a document, None for the whole row
CASES: tuple[tuple[str, int | None], ...] = (("gemma3-270m", None), ("llama-3.2-1b", 512), ("llama-3.2-1b", 128))


def build(shape: str, *, quick: bool) -> Any:
    """A decoder in training, of a few small layers where `quick`."""
    fields = {"model_type": "llama", **SHAPES[shape]}
    if quick:
        fields |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    config = AutoConfig.for_model(**fields)
    if quick and hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:2]
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModel.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16 if on_gpu else torch.float32
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def step(model: Any, n: int, document: int | None) -> None:
    """Forward and backward of one row."""
    model.zero_grad()
    ids = torch.zeros(1, n, dtype=torch.int64, device=model.device)
    # positions that begin again tell Transformers where documents do
    places = {} if document is None else {"position_ids": torch.arange(n, device=model.device)[None] % document}
    model(input_ids=ids, use_cache=False, **places).last_hidden_state.sum().backward()


def fastest(model: Any, n: int, document: int | None, repeats: int) -> dict[str, float] | None:
    """Seconds and peak memory of the fastest step behind a first one; None where it does not fit."""
    try:
        step(model, n, document)
        return min((measured(lambda: step(model, n, document))[1] for _ in range(repeats)), key=lambda x: x["seconds"])
    except torch.OutOfMemoryError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="file that gets the JSON lines as well")
    args = parser.parse_args()
    tell = partial(tell_line, out=args.out)
    tell(setting())
    for shape, document in CASES:
        model = build(shape, quick=args.quick)
        free = MaskFreeRows(model)
        for n in args.tokens:
            masks = fastest(model, n, document, args.repeats)
            with free.active():
                none = fastest(model, n, document, args.repeats)
            ratio = masks["seconds"] / none["seconds"] if masks and none else None
            tell({"shape": shape, "tokens": n, "document": document, "masks": masks, "none": none, "ratio": ratio})


if __name__ == "__main__":
    main()
