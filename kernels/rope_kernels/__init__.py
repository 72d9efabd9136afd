"""Memory-lean ops for training and evaluation with perturbed positions, each with a plain reference twin.

Importing this package imports torch only; Triton is imported where an op needs it.
"""

from .decode.decode_attention import decode_attention
from .decode.reference import decode_attention_ref
from .row_kl.attention_map_kl import attention_map_kl
from .row_kl.reference import attention_map_kl_ref, relation_kl_ref
from .row_kl.relation_kl import relation_kl
from .row_kl.relation_mse import relation_mse
from .row_kl.visibility import Visibility, make_visibility
from .vocabulary.linear_ce_kl import linear_ce_kl
from .vocabulary.linear_ce_rows import linear_ce_rows
from .vocabulary.reference import linear_ce_kl_ref, linear_ce_rows_ref
from .vocabulary.rows import RowMetrics

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
    "make_visibility",
    "relation_kl",
    "relation_kl_ref",
    "relation_mse",
]
