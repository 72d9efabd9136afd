"""Write one of PosAug's five models with random weights, for recipes to train from scratch.

Run:  python examples/papers/posaug/random_weights.py 10m --output posaug-10m [--tokenizer MODEL] [--seed 42]

Shapes are those of the paper's table 16, in which parameters are counted without embeddings. Layers are Llama's, with
RoPE at a base of 1e4, and embeddings are tied.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

# hidden size, layers, query heads, key and value heads, inner size
SIZES = {
    "10m": (384, 6, 6, 6, 1024),
    "42m": (768, 6, 12, 12, 2048),
    "113m": (768, 12, 12, 12, 3072),
    "425m": (1280, 24, 20, 4, 3584),
    "1b": (2048, 24, 32, 8, 5632),
}
WINDOW = 2048


def config(size: str, vocabulary: int) -> LlamaConfig:
    """The config of a size, with this number of tokens."""
    hidden, layers, heads, kv_heads, inner = SIZES[size]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=inner,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    )


def main() -> None:
    """Write model and tokenizer."""
    parser = argparse.ArgumentParser(description="Write a model of PosAug's paper with random weights.")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokenizer", default="openai-community/gpt2", help="hub id or folder; default: %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="of the weights; default: %(default)s")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if tokenizer.pad_token is None:  # GPT-2's has none
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = None  # the model writes no chats
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM._from_config(config(args.size, len(tokenizer)), dtype=torch.float32)
    for ids in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, ids, getattr(tokenizer, ids))
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
