"""KL between the rows of two attention-like maps, and its gradients, in plain torch and linear memory.

The map of a chunk of query rows against all keys is formed, used and dropped. This runs on a CPU, and the Triton
kernels are compared with it where a float64 map of all rows would not fit.
"""

from collections.abc import Iterator

import torch

from .visibility import Visibility

_CHUNK_BYTES = 2**24  # of one map of a chunk, in the dtype that it is computed in: small enough for caches


def row_kl_forward(
    student_q: torch.Tensor,
    student_k: torch.Tensor,
    teacher_q: torch.Tensor,
    teacher_k: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    visibility: Visibility,
) -> torch.Tensor:
    """`custom_op.row_kl` with both scales, and with keys also where they are the queries."""
    kl = torch.zeros(student_q.shape[:3], dtype=_compute_dtype(student_q), device=student_q.device)
    for rows, keys in chunks(student_q, visibility):
        seen = visibility.mask(rows, keys, kl.device)[:, :, None]  # [batch or 1, 1, 1, n_rows, n_keys]
        student = log_map(student_q, student_k, rows, keys, student_scale, seen)
        teacher = log_map(teacher_q, teacher_k, rows, keys, teacher_scale, seen)
        gap = (teacher - student).masked_fill_(~seen, 0)  # [batch, n_kv_heads, group, n_rows, n_keys]
        kl[:, :, rows] = teacher.exp().mul_(gap).sum(-1).view(kl[:, :, rows].shape)
    return kl


def row_kl_backward(
    grad: torch.Tensor,
    student_q: torch.Tensor,
    student_k: torch.Tensor,
    teacher_q: torch.Tensor,
    teacher_k: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    visibility: Visibility,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients to student_q and student_k of `row_kl_forward`, in their layouts, given `grad` [batch, n_heads, n].

    With z = student_scale q_i . k_j, dKL_i / dz_ij = P_student(i, j) - P_teacher(i, j).
    """
    dtype = _compute_dtype(student_q)
    grad_q = torch.zeros_like(student_q, dtype=dtype)
    grad_k = torch.zeros_like(student_k, dtype=dtype)
    for rows, keys in chunks(student_q, visibility):
        seen = visibility.mask(rows, keys, grad_q.device)[:, :, None]
        student = log_map(student_q, student_k, rows, keys, student_scale, seen).exp_()
        teacher = log_map(teacher_q, teacher_k, rows, keys, teacher_scale, seen).exp_()
        # rows that see nothing have equal maps here, so nothing flows from them
        dz = (student - teacher).mul_(_grouped(grad[:, :, rows, None], student_k).to(dtype) * student_scale)
        k = student_k[:, :, None, keys].to(dtype)  # [batch, n_kv_heads, 1, n_keys, head_dim]
        grad_q[:, :, rows] += (dz @ k).view(grad_q[:, :, rows].shape)
        q = _grouped(student_q[:, :, rows], student_k).to(dtype)  # [batch, n_kv_heads, group, n_rows, head_dim]
        grad_k[:, :, keys] += (dz.transpose(-1, -2) @ q).sum(2)  # over the query heads that share the key head
    return grad_q.to(student_q.dtype), grad_k.to(student_k.dtype)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def chunks(q: torch.Tensor, visibility: Visibility) -> Iterator[tuple[slice, slice]]:
    """Query rows of [batch, n_heads, n, head_dim], and the keys that they can see."""
    batch, n_heads, seq_len, _ = q.shape
    size = _compute_dtype(q).itemsize
    n_rows = max(1, _CHUNK_BYTES // max(1, size * batch * n_heads * seq_len))
    for start in range(0, seq_len, n_rows):
        rows = slice(start, min(start + n_rows, seq_len))
        yield rows, slice(0, rows.stop if visibility.causal else seq_len)


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[batch, n_heads, ...] -> [batch, n_kv_heads, group, ...]."""
    return x.unflatten(1, (k.shape[1], -1))


def log_map(
    q: torch.Tensor, k: torch.Tensor, rows: slice, keys: slice, scale: float, seen: torch.Tensor
) -> torch.Tensor:
    """Log of the map of `rows`, [batch, n_kv_heads, group, n_rows, n_keys]; uniform where nothing is seen.

    Args:
        q: [batch, n_heads, n, head_dim].
        k: [batch, n_kv_heads, n, head_dim].
        rows: of the map.
        keys: that the rows are multiplied with.
        scale: of scores.
        seen: bool [batch or 1, 1, 1, n_rows, n_keys].
    """
    dtype = _compute_dtype(q)
    scores = _grouped(q[:, :, rows], k).to(dtype) @ k[:, :, None, keys].to(dtype).transpose(-1, -2)
    # not -inf: rows that see nothing become uniform, and not nan
    lowest = torch.finfo(dtype).min
    return (scores.mul_(scale)).masked_fill_(~seen, lowest).log_softmax(-1)
