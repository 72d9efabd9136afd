"""Squared difference of self-relations, the control that LinearARD argues against: its gradient vanishes with R_s."""

import torch
from torch.utils.checkpoint import checkpoint

from .autocast import as_multiplied
from .row_kl import require_heads
from .row_kl_chunked import chunks, log_map
from .visibility import Visibility, make_visibility


def relation_mse(
    student: torch.Tensor,
    teacher: torch.Tensor,
    causal: bool = True,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
    visibility: Visibility | None = None,
) -> torch.Tensor:
    """sum_j (R_t(i, j) - R_s(i, j))^2 of each row i, with the relations and arguments of `relation_kl`.

    In plain torch and linear memory: maps exist for some rows at a time, in the forward and again in the backward.

    Returns:
        [batch, n_heads, n] float32, float64 for float64 inputs, 0 on padding.

    Raises:
        ValueError: a shape, dtype or device is not as `relation_kl` wants.

    Source: LinearARD, arXiv:2604.00004, MSE control.
    """
    require_heads("student", student, "teacher", teacher)
    batch, n_heads, n, head_dim = student.shape
    if visibility is None:
        visibility = make_visibility(batch, n, student.device, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
    seen_by = visibility
    student, teacher = as_multiplied(student), as_multiplied(teacher)
    scales = [head_dim**-0.5 if scale is None else scale for scale in (student_scale, teacher_scale)]

    def of_rows(student: torch.Tensor, teacher: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        seen = seen_by.mask(rows, keys, student.device)[:, :, None]
        with torch.autocast(student.device.type, enabled=False):
            maps = [log_map(x, x, rows, keys, z, seen).exp() for x, z in zip((student, teacher), scales, strict=True)]
        # rows that see nothing have equal maps here
        return (maps[1] - maps[0]).square().sum(-1).flatten(1, 2)

    parts = [
        checkpoint(of_rows, student, teacher.detach(), rows, keys, use_reentrant=False)
        for rows, keys in chunks(student, visibility)
    ]
    return torch.cat(parts, -1)
