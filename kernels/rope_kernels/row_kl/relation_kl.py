"""KL of causal self-relations, the loss of LinearARD: exact, in linear memory, with gradient to the student."""

from collections.abc import Sequence

import torch

from .checks import require_heads
from .custom_op import row_kl
from .visibility import Visibility, visibility_of


def relation_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    causal: bool | None = None,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
    visibility: Visibility | None = None,
    found: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """KL(R_t(i, :) || R_s(i, :)) of each row i, with R = softmax_row(scale X X^T + mask), in nats.

    X stands on both sides of X X^T, and the gradient has both parts: with D = (R_s - R_t) times the rows' incoming
    gradient, dX_s = scale (D + D^T) X_s. No n x n tensor is formed; the result is deterministic.

    Args:
        student: X_s, [batch, n_heads, n, head_dim], float16, bfloat16, float32 or, outside Triton, float64; any
            strides.
        teacher: X_t, of the same shape and dtype; no gradient flows to it.
        causal: whether row i sees keys up to i, itself included, only; None means True.
        key_mask: [batch, n] bool, False on padding: such rows give 0 and are seen by none.
        cu_seqlens: [n_documents + 1] int32 or int64, or a list, where documents begin in the batch * n tokens in row
            order, 0 first, every start of a row among them and batch * n last: rows see their own document only.
        student_scale: of X_s X_s^T, above 0; None means head_dim ** -0.5.
        teacher_scale: of X_t X_t^T, above 0; None means head_dim ** -0.5.
        visibility: for these inputs, made once for many calls, instead of `causal`, `key_mask` and `cu_seqlens`.
        found: an empty list, which is filled with what the forward finds. A second call with the same values and this
            list, as a checkpointed layer makes in backward, takes it from there.

    Returns:
        [batch, n_heads, n] float32, float64 for float64 inputs. A row that sees a token with nan or infinity in it is
        nan or infinite; a row that sees nothing is 0.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.

    Source: LinearARD, arXiv:2604.00004, eq. of L_X; its two-pass algorithm is replaced by one sweep and a symmetric
        backward.
    """
    require_heads("student", student, "teacher", teacher)
    visibility = visibility_of("student", student, causal, key_mask, cu_seqlens, visibility)
    return row_kl((student, None), (teacher, None), student_scale, teacher_scale, visibility, found)
