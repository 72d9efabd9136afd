"""Files of a checkpoint beside RoPE: weights, tokenizer, shards, a disk that is full.

Import its modules by name.
"""
