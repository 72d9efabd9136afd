"""Memory-lean ops for training and evaluation with perturbed positions, each with a plain reference twin.

Importing this package imports torch only; Triton is imported where an op needs it.
"""

from .linear_ce import linear_ce_rows, linear_ce_rows_ref

__all__ = ["linear_ce_rows", "linear_ce_rows_ref"]
