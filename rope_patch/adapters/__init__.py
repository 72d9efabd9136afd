"""What a PEFT adapter records of RoPE: `rope_patch.json` beside its weights, written whenever PEFT saves.

`sidecar` reads and writes it; `watch` keeps it true.
"""
