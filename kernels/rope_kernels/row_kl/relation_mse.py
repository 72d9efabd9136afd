"""Squared difference of self-relations, the control that LinearARD argues against: its gradient vanishes with R_s."""

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from ..common.autocast import as_multiplied
from .checks import require_heads, scales_of
from .chunked import chunks, log_map
from .visibility import Visibility, visibility_of


def relation_mse(
    student: torch.Tensor,
    teacher: torch.Tensor,
    causal: bool | None = None,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
    visibility: Visibility | None = None,
) -> torch.Tensor:
    """sum_j (R_t(i, j) - R_s(i, j))^2 of each row i, with the relations and arguments of `relation_kl`.

    In plain torch and linear memory: maps exist for some rows at a time, in the forward and again in the backward.

    Returns:
        [batch, n_heads, n] float32, float64 for float64 inputs, 0 on padding. A row that sees a token with nan in it is
        nan; infinity in a token makes its own row nan.

    Raises:
        ValueError: an argument is not as `relation_kl` wants it.

    Source: LinearARD, arXiv:2604.00004, its proposition against MSE.
    """
    require_heads("student", student, "teacher", teacher)
    seen_by = visibility_of("student", student, causal, key_mask, cu_seqlens, visibility)
    student, teacher = as_multiplied(student), as_multiplied(teacher)
    scales = scales_of(student.shape[-1], student_scale, teacher_scale)

    def of_rows(student: torch.Tensor, teacher: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        seen = seen_by.mask(rows, keys, student.device)[:, :, None]  # [batch or 1, 1, 1, n_rows, n_keys]
        with torch.autocast(student.device.type, enabled=False):
            maps = [log_map(x, x, rows, keys, z, seen).exp() for x, z in zip((student, teacher), scales, strict=True)]
        # rows that see nothing have equal maps here
        return (maps[1] - maps[0]).square().sum(-1).flatten(1, 2)  # [batch, n_heads, n_rows]

    parts = [
        checkpoint(of_rows, student, teacher.detach(), rows, keys, use_reentrant=False)
        for rows, keys in chunks(student, seen_by)
    ]
    return torch.cat(parts, -1)
