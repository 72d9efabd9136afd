"""What model families can do, and why not: `table` for what their code alone shows, config and modules for the rest.

Everything that asks about a family imports `capabilities` and `local_layers`; nothing here reads modeling code.
"""
