"""Time and peak memory of evaluation at length, on one GPU.

Run:   python benchmarks/eval_memory.py [--lengths 8192 32768 131072] [--layers 32] [--out FILE.json]
Shape: Llama-3-8B with random weights in bf16, one row or prompt. Beside each peak stands what n x n scores of one head
and n x vocabulary logits in bf16 would take: none of them is ever held.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from view_overhead import build

from rope_patch.eval import attention_distance, loss_by_position, view_kl
from rope_patch.generation.generation import greedy_answers

GIB = 1 << 30


class Digits:
    """Stands for a tokenizer where text does not matter."""

    pad_token_id = 0
    eos_token_id = 0

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [str(row) for row in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = build("llama-3-8b", args.layers)
    vocab = model.config.vocab_size
    at_rest = torch.cuda.memory_allocated()
    rows = []
    for seq_len in args.lengths:
        ids = torch.randint(3, vocab, (1, seq_len))  # without padding and end of text
        measures: dict[str, Callable[[], object]] = {
            "loss_by_position": lambda ids=ids: loss_by_position(model, ids, progress=False),
            "attention_distance": lambda ids=ids: attention_distance(model, ids, progress=False),
            "view_kl, one skip": lambda ids=ids: view_kl(model, ids, [4096], progress=False),
            "greedy_answers, 16 tokens": lambda ids=ids: greedy_answers(
                model, Digits(), ids.tolist(), max_new_tokens=16
            ),
        }
        for name, measure in measures.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            measure()
            torch.cuda.synchronize()
            rows.append(
                {
                    "measure": name,
                    "seq_len": seq_len,
                    "seconds": time.perf_counter() - begin,
                    "peak_gib_above_weights": (torch.cuda.max_memory_allocated() - at_rest) / GIB,
                    "n_by_n_gib": 2 * seq_len**2 / GIB,  # 2 bytes of a score, of one head
                    "n_by_vocab_gib": 2 * seq_len * vocab / GIB,
                }
            )
            row = rows[-1]
            print(
                f"{name:28}{seq_len:8} tokens {row['seconds']:8.2f} s  peak {row['peak_gib_above_weights']:7.2f} "
                f"GiB above weights  (n x n {row['n_by_n_gib']:.1f}, n x V {row['n_by_vocab_gib']:.1f})",
                flush=True,
            )
    if args.out:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "shape": f"Llama-3-8B, {args.layers} layers, batch 1, bf16, sdpa, random weights",
            "weights_gib": at_rest / GIB,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rows": rows,
        }
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
