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
    log_maps = []
    for q, k, scale in ((student_q, student_k, student_scale), (teacher_q, teacher_k, teacher_scale)):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        log_maps.append(scores.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0))
    student_map, teacher_map = log_maps
    return (teacher_map.exp() * (teacher_map - student_map)).masked_fill(~visible, 0).sum(-1)


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
