"""RoPE in a Transformers model: its rotary modules, and what its config says about them.

Import from `rotary`: which modules there are, which decoder calls them, what state they have.
"""
