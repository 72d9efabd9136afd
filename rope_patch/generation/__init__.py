"""Writing text in batches of prompts that share a KV cache.

`eval`, training rows and `extend` import from here; it imports no measure.
"""
