"""KL of causal self-relations, the loss of LinearARD: exact, in linear memory, with gradient to the student."""

from typing import Any

import torch

from .row_kl import empty_rows, require_heads, runs_on_triton, unit_last_stride
from .visibility import Visibility, make_visibility


def relation_kl(
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
    """KL(R_t(i, :) || R_s(i, :)) of each row i, with R = softmax_row(scale X X^T + mask), in nats.

    X stands on both sides of X X^T, and the gradient has both parts: with D = (R_s - R_t) times the rows' incoming
    gradient, dX_s = scale (D + D^T) X_s. No n x n tensor is formed; the result is deterministic.

    Args:
        student: X_s, [batch, n_heads, n, head_dim], float16, bfloat16, float32 or, outside Triton, float64; any
            strides.
        teacher: X_t, of the same shape and dtype; no gradient flows to it.
        causal: whether row i sees keys up to i, itself included, only.
        key_mask: [batch, n] bool, False on padding: such rows give 0 and are seen by none.
        cu_seqlens: [n_documents + 1] integers, where documents begin in the batch * n tokens in row order, 0 first and
            batch * n last: rows see their own document only.
        student_scale: of X_s X_s^T; None means head_dim ** -0.5.
        teacher_scale: of X_t X_t^T; None means head_dim ** -0.5.
        visibility: instead of the three arguments before, made once for many calls.

    Returns:
        [batch, n_heads, n] float32, float64 for float64 inputs.

    Raises:
        ValueError: a shape, dtype or device is not as above.

    Source: LinearARD, arXiv:2604.00004, eq. of L_X; its two-pass algorithm is replaced by one sweep and a symmetric
        backward.
    """
    student, teacher = unit_last_stride(student), unit_last_stride(teacher.detach())
    require_heads("student", student, "teacher", teacher)
    if visibility is None:
        visibility = make_visibility(
            student.shape[0], student.shape[2], student.device, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens
        )
    scale = student.shape[-1] ** -0.5
    kl, _ = _relation_kl(
        student,
        teacher,
        scale if student_scale is None else student_scale,
        scale if teacher_scale is None else teacher_scale,
        visibility.causal,
        *visibility.tensors,
    )
    return kl


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
        student: [..., n, head_dim].
        teacher: of the same shape.
        visible: [..., n, n] bool.
        student_scale: None means head_dim ** -0.5.
        teacher_scale: None means head_dim ** -0.5.
    """
    log_maps = []
    for x, scale in ((student, student_scale), (teacher, teacher_scale)):
        scores = x @ x.transpose(-1, -2) * (x.shape[-1] ** -0.5 if scale is None else scale)
        log_maps.append(scores.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0))
    student_map, teacher_map = log_maps
    return (teacher_map.exp() * (teacher_map - student_map)).masked_fill(~visible, 0).sum(-1)


# An operator of its own, so that torch.compile and checkpointing take it as one step.
@torch.library.custom_op("rope_kernels::relation_kl", mutates_args=())
def _relation_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    causal: bool,
    document: torch.Tensor | None,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    visibility = Visibility(causal, document, first, end)
    if runs_on_triton(student):
        from .row_kl_triton import row_kl_forward

        return row_kl_forward(student, student, teacher, teacher, student_scale, teacher_scale, visibility)
    from .row_kl_chunked import row_kl_forward as chunked

    kl = chunked(student, student, teacher, teacher, student_scale, teacher_scale, visibility)
    return kl, kl.new_empty(0)


@_relation_kl.register_fake
def _(student: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_rows(student)


@torch.library.custom_op("rope_kernels::relation_kl_backward", mutates_args=())
def _relation_kl_backward(
    grad: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    parts: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    causal: bool,
    document: torch.Tensor | None,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
) -> torch.Tensor:
    visibility = Visibility(causal, document, first, end)
    if runs_on_triton(student):
        from .row_kl_triton import relation_kl_backward

        return relation_kl_backward(grad, student, teacher, parts, student_scale, teacher_scale, visibility)
    from .row_kl_chunked import row_kl_backward

    as_query, as_key = row_kl_backward(
        grad, student, student, teacher, teacher, student_scale, teacher_scale, visibility
    )
    return as_query + as_key


@_relation_kl_backward.register_fake
def _(grad: torch.Tensor, student: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(student)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    student, teacher, student_scale, teacher_scale, causal, *bounds = inputs
    _, parts = output
    ctx.save_for_backward(student, teacher, parts, *bounds)
    ctx.settings = (student_scale, teacher_scale, causal)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    student, teacher, parts, *bounds = ctx.saved_tensors
    return _relation_kl_backward(grad, student, teacher, parts, *ctx.settings, *bounds), *(None,) * 7


_relation_kl.register_autograd(_backward, setup_context=_setup)
