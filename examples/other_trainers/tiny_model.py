"""The model that the examples of this folder train: that of --model, else a tiny random one, in seconds on a CPU."""

import argparse
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_ext.runs.checkpoint import require_checkpoint

TEXT = "once upon a time there was a word that stood far behind another word and was read all the same"


def parse_arguments(description: str) -> argparse.Namespace:
    """`--model`, `--output-dir` and `--steps`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="hub id or folder of a causal LM; default: a tiny random one")
    # one for each script: an adapter that one leaves there would be put on the weights that the next one saves
    folder = f"out-{Path(sys.argv[0]).stem}"
    parser.add_argument("--output-dir", default=folder, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps; default: %(default)s")
    return parser.parse_args()


def load(name: str | None):
    """A model and its tokenizer."""
    if name is not None:
        require_checkpoint(name, "--model")
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *dict.fromkeys(TEXT.split())])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,  # <pad> and <eos> of `words`
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config), tokenizer
