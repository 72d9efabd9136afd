"""Reference twins of this family: the formulas with dense maps, in plain torch."""

import torch


def attention_map_kl_ref(
    student_q: torch.Tensor,
    student_k: torch.Tensor,
    teacher_q: torch.Tensor,
    teacher_k: torch.Tensor,
    visible: torch.Tensor,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
) -> torch.Tensor:
    """Reference twin of `attention_map_kl`: the formula, with dense maps and repeated keys, in the dtype of the inputs.

    Args:
        student_q: [batch, n_heads, n, head_dim].
        student_k: [batch, n_kv_heads, n, head_dim].
        teacher_q: like `student_q`.
        teacher_k: like `student_k`.
        visible: [..., n, n] bool, that broadcasts to [batch, n_heads, n, n].
        student_scale: None means head_dim ** -0.5.
        teacher_scale: None means head_dim ** -0.5.
    """
    group = student_q.shape[1] // student_k.shape[1]  # query heads of a key head
    student, teacher = (
        _log_map(q, k.repeat_interleave(group, 1), visible, scale)
        for q, k, scale in ((student_q, student_k, student_scale), (teacher_q, teacher_k, teacher_scale))
    )
    return (teacher.exp() * (teacher - student)).masked_fill(~visible, 0).sum(-1)


def relation_kl_ref(
    student: torch.Tensor,
    teacher: torch.Tensor,
    visible: torch.Tensor,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
) -> torch.Tensor:
    """Reference twin of `relation_kl`: the formula, with dense maps, in the dtype of `student`.

    Args:
        student: [batch, n_heads, n, head_dim].
        teacher: of the same shape.
        visible: [..., n, n] bool, that broadcasts to [batch, n_heads, n, n].
        student_scale: None means head_dim ** -0.5.
        teacher_scale: None means head_dim ** -0.5.
    """
    return attention_map_kl_ref(
        student, student, teacher, teacher, visible, student_scale=student_scale, teacher_scale=teacher_scale
    )


def relation_mse_ref(
    student: torch.Tensor,
    teacher: torch.Tensor,
    visible: torch.Tensor,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
) -> torch.Tensor:
    """Reference twin of `relation_mse`: the formula, with dense maps, and the arguments of `relation_kl_ref`."""
    student_map, teacher_map = (
        _log_map(x, x, visible, scale).exp()
        for x, scale in ((student, student_scale), (teacher.detach(), teacher_scale))
    )
    return (teacher_map - student_map).masked_fill(~visible, 0).square().sum(-1)


def _log_map(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Log of softmax_row(scale Q K^T) over what is visible, 0 elsewhere."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [batch, n_heads, n, n]
    return scores.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0)
