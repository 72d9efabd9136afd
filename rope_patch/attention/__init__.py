"""What replaces or reads the attention of a loaded model, by the functions that Transformers keeps in a table."""
