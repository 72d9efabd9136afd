"""Replacing or watching the attention of a loaded model, through Transformers' table of attention functions.

Import its modules by name; `string_positions` is public.
"""
