"""Memory-lean ops for training and evaluation with perturbed positions, each with a plain reference twin.

Importing this package imports torch only; Triton is imported where an op needs it.
"""

from .attention_map_kl import attention_map_kl, attention_map_kl_ref
from .decode_attention import decode_attention, decode_attention_ref
from .linear_ce import linear_ce_rows, linear_ce_rows_ref
from .linear_ce_kl import linear_ce_kl, linear_ce_kl_ref
from .linear_kl import linear_kl_rows
from .relation_kl import relation_kl, relation_kl_ref
from .relation_mse import relation_mse
from .visibility import Visibility, make_visibility
from .vocabulary_rows import RowMetrics

__all__ = [
    "RowMetrics",
    "Visibility",
    "attention_map_kl",
    "attention_map_kl_ref",
    "decode_attention",
    "decode_attention_ref",
    "linear_ce_kl",
    "linear_ce_kl_ref",
    "linear_ce_rows",
    "linear_ce_rows_ref",
    "linear_kl_rows",
    "make_visibility",
    "relation_kl",
    "relation_kl_ref",
    "relation_mse",
]
