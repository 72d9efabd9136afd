"""What model families can do, and why not, by `base/family_table.py`, config and modules.

Other rooms ask `capabilities` and `local_layers`; nothing here reads modeling code.
"""
