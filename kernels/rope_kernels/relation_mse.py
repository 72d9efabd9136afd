"""Squared difference of self-relations, the control that LinearARD argues against: its gradient vanishes with R_s."""

import torch
from torch.utils.checkpoint import checkpoint

from .autocast import as_multiplied
from .row_kl import require_heads
from .visibility import Visibility, make_visibility

_CHUNK_BYTES = 2**24  # of one map of a chunk: small enough for caches


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
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    student, teacher = as_multiplied(student), as_multiplied(teacher)
    scales = [head_dim**-0.5 if scale is None else scale for scale in (student_scale, teacher_scale)]

    def rows(student: torch.Tensor, teacher: torch.Tensor, first: int, end: int) -> torch.Tensor:
        n_keys = end if seen_by.causal else n  # none of these rows sees a key behind its chunk
        seen = seen_by.mask(slice(first, end), n, student.device)[..., :n_keys]
        maps = []
        with torch.autocast(student.device.type, enabled=False):
            for x, scale in zip((student.to(dtype), teacher.to(dtype)), scales, strict=True):
                scores = (x[:, :, first:end] @ x[:, :, :n_keys].transpose(-1, -2) * scale).masked_fill(
                    ~seen, torch.finfo(dtype).min
                )
                maps.append(scores.softmax(-1).masked_fill(~seen, 0))
        return (maps[1] - maps[0]).square().sum(-1)

    step = max(1, _CHUNK_BYTES // (dtype.itemsize * batch * n_heads * n))
    parts = [
        checkpoint(rows, student, teacher.detach(), first, min(first + step, n), use_reentrant=False)
        for first in range(0, n, step)
    ]
    return torch.cat(parts, -1)
