"""A Llama of 10.6M parameters with random weights, and a tokenizer for it: a model that is native to a short window.

Run: python benchmarks/small_model.py FOLDER --texts books.jsonl.xz ... [--window 2048] [--vocabulary 16384]

Its shape is that of PosAug's smallest; the tokenizer is a byte-level BPE of the texts that keeps digits apart, so that
numbers can be copied digit by digit.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from posaug_from_scratch import SHAPE
from token_text import SEPARATOR, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rope_patch.eval import read_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--documents", type=int, default=200, help="that the tokenizer is trained on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--override", type=json.loads, default={}, help="fields of LlamaConfig, as JSON")
    args = parser.parse_args()
    bpe = train_tokenizer(islice(read_texts(args.texts), args.documents), args.vocabulary, digits_apart=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SEPARATOR, pad_token=SEPARATOR)
    torch.manual_seed(args.seed)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": args.window}
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **sizes, **ends, **args.override}))
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{sum(p.numel() for p in model.model.layers.parameters()) / 1e6:.1f}M parameters in layers, {args.folder}")


if __name__ == "__main__":
    main()
