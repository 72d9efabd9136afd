"""Where tokens lie: documents of a batch, labels of their tokens, and rows with a copy of what a view moves.

Works on tensors alone; import its modules by name.
"""
