"""The folder of a run: what it records, how it is resumed, and the model card that it leaves.

The trainer, recipes and `extend` import from here.
"""
