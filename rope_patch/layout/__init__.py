"""Layout of a batch: documents, labels, shards of a row, and rows with a second copy of moved tokens.

Works on tensors alone; import its modules by name.
"""
