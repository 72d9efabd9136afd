"""Loading and writing checkpoint files: weights, tokenizer, license, shards, full disks.

Import its modules by name.
"""
