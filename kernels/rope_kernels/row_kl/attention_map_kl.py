"""KL of attention maps, LinearARD's ATTN variant: exact, in linear memory, with gradients to queries and keys."""

from collections.abc import Sequence

import torch

from .checks import require_heads
from .custom_op import row_kl
from .visibility import Visibility, visibility_of


def attention_map_kl(
    student_q: torch.Tensor,
    student_k: torch.Tensor,
    teacher_q: torch.Tensor,
    teacher_k: torch.Tensor,
    causal: bool | None = None,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
    visibility: Visibility | None = None,
    found: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """KL(A_t(i, :) || A_s(i, :)) of each query i, with A = softmax_row(scale Q K^T + mask), in nats.

    With C_ij = (A_s - A_t)_ij times the rows' incoming gradient, dQ_s = scale C K_s and dK_s = scale C^T Q_s, summed
    over the query heads that share a key head. No n x n tensor is formed; the result is deterministic.

    Args:
        student_q: Q_s, [batch, n_heads, n, head_dim], float16, bfloat16, float32 or, outside Triton, float64.
        student_k: K_s, [batch, n_kv_heads, n, head_dim], not repeated; n_heads is a multiple of n_kv_heads.
        teacher_q: Q_t, like Q_s; no gradient flows to it.
        teacher_k: K_t, like K_s; no gradient flows to it.
        causal: whether query i sees keys up to i only; None means True.
        key_mask: as in `relation_kl`.
        cu_seqlens: as in `relation_kl`.
        student_scale: of Q_s K_s^T, above 0; None means head_dim ** -0.5.
        teacher_scale: of Q_t K_t^T, above 0; None means head_dim ** -0.5.
        visibility: as in `relation_kl`.
        found: as in `relation_kl`.

    Returns:
        [batch, n_heads, n] float32, float64 for float64 inputs. A row that sees a token with nan or infinity in it is
        nan or infinite; a row that sees nothing is 0.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.

    Source: LinearARD, arXiv:2604.00004, ablation ATTN+V.
    """
    require_heads("student_q", student_q, "teacher_q", teacher_q)
    require_heads("student_k", student_k, "teacher_k", teacher_k)
    batch, n_heads, n, head_dim = student_q.shape
    k_is_like_q = (
        (student_k.shape[0], *student_k.shape[2:]) == (batch, n, head_dim)
        and student_k.dtype == student_q.dtype
        and student_k.device == student_q.device
    )
    if not k_is_like_q or n_heads % student_k.shape[1]:
        raise ValueError(
            f"student_k must be [{batch}, n_kv_heads, {n}, {head_dim}] {student_q.dtype} on {student_q.device}, with "
            f"n_kv_heads a divisor of {n_heads}, got {list(student_k.shape)} {student_k.dtype} on {student_k.device}."
        )
    visibility = visibility_of("student_q", student_q, causal, key_mask, cu_seqlens, visibility)
    return row_kl((student_q, student_k), (teacher_q, teacher_k), student_scale, teacher_scale, visibility, found)
