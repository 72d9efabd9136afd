"""What a training step takes of memory, and how long rows are made to fit.

`step` estimates memory from the sizes of a model, `plan` decides by it, and the other modules are what it plans.
"""
