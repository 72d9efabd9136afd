"""What a training step takes of memory, and how long rows are made to fit.

`plan` is the estimate; the other modules are what it plans.
"""
