"""What model families can do, and why not: asked of `base/family_table.py`, of the config and of the modules.

Everything that asks about a family imports `capabilities` and `local_layers`; nothing here reads modeling code.
"""
