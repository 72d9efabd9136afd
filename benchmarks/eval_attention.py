"""Tokens and attention of reading all retrieval prompts of a length: each alone, kind by kind, and all kinds together.

Run:   python benchmarks/eval_attention.py [--length 65536] [--trials 2] [--models 3] [--seconds 0.3]
Shape: all six kinds, ten depths, SmolLM2's tokenizer and Python's own sources as text; no model is loaded.

Each line has the work of one model: `prompts`, `tokens` that are read, and `pairs`, the sum over them of the tokens
that each looks at, which is what attention costs. `readings` are pairs over those of one whole prompt. `seconds` are an
estimate of reading by --models models, without decoding and loading: pairs over those of 60000 tokens, times --seconds,
the time of reading so many on a GPU. It is 0.3 for SmolLM2-135M on an H200, where attention is nearly all of it.
"""

import argparse
import json
from collections.abc import Sequence

from transformers import AutoTokenizer

from rope_patch.eval import read_texts, standard_library_files
from rope_patch.eval.measures.prompt_grid import DEPTHS, retrieval_prompts
from rope_patch.prompts.needles import KINDS, Kind
from trl_ext.demo.model import embedded_file

_TIMED = 60_000  # tokens of the prompt that took --seconds


def reading(prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(tokens, pairs) of reading prompts in order, where each begins with what it shares with the one before."""
    tokens = pairs = 0
    before: Sequence[int] = ()
    for prompt in sorted(list(p) for p in prompts):
        shared = next((k for k, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
        # the last token is read in any case, for its logits
        shared = min(shared, len(prompt) - 1)
        tokens += len(prompt) - shared
        # token t looks at t + 1 tokens
        pairs += len(prompt) * (len(prompt) + 1) // 2 - shared * (shared + 1) // 2
        before = prompt
    return tokens, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of reading 60000 tokens")
    args = parser.parse_args()
    file = embedded_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts: dict[Kind, list[list[int]]] = {
        kind: [
            p.ids
            for p in retrieval_prompts(
                kind, tokenizer, read_texts(standard_library_files()), args.length, trials=args.trials
            )
        ]
        for kind in KINDS
    }
    every = [ids for of_kind in prompts.values() for ids in of_kind]
    whole, timed = (n * (n + 1) / 2 for n in (args.length, _TIMED))
    by_kind = {kind: reading(of_kind) for kind, of_kind in prompts.items()}
    alone = [reading([ids]) for ids in every]
    lines = {
        "each prompt alone": (sum(t for t, _ in alone), sum(p for _, p in alone)),
        **{f"{kind}, in one call": times for kind, times in by_kind.items()},
        "kind by kind": (sum(t for t, _ in by_kind.values()), sum(p for _, p in by_kind.values())),
        "all kinds in one call": reading(every),
    }
    for name, (tokens, pairs) in lines.items():
        n = len(prompts[KINDS[0]]) if name.endswith(", in one call") else len(every)
        seconds = round(args.models * args.seconds * pairs / timed, 1)
        line = {"what": name, "prompts": n, "tokens": tokens, "pairs": pairs, "readings": round(pairs / whole, 1)}
        print(json.dumps({**line, "seconds": seconds, "length": args.length, "depths": len(DEPTHS)}))


if __name__ == "__main__":
    main()
