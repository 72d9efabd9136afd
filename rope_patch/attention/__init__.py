"""What replaces or reads the attention of a loaded model, by the functions that Transformers keeps in a table.

Import its modules by name; `string_positions` is public.
"""
