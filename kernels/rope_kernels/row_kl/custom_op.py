"""KL between the rows of two maps as one operator, which `relation_kl` and `attention_map_kl` call.

It runs Triton kernels on a GPU and chunked torch elsewhere. torch.compile takes forward and backward as two registered
operators; without it they are called as functions, because the layers of `torch.library` take longer than the kernels
of a short row.
"""

from typing import Any

import torch

from ..common.autocast import as_multiplied
from ..common.devices import runs_on_triton
from .checks import scales_of
from .hopper_inputs import runs_on_hopper
from .visibility import Visibility


def row_kl(
    student: tuple[torch.Tensor, torch.Tensor | None],
    teacher: tuple[torch.Tensor, torch.Tensor | None],
    student_scale: float | None,
    teacher_scale: float | None,
    visibility: Visibility,
    found: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """KL(softmax(teacher_scale Qt Kt^T) || softmax(student_scale Qs Ks^T)) of each row, [batch, n_heads, n].

    Args:
        student: Q_s [batch, n_heads, n, head_dim] and K_s [batch, n_kv_heads, n, head_dim]; None in place of K_s means
            that it is Q_s, and the gradient to it has both parts.
        teacher: Q_t and K_t, of the shapes of Q_s and K_s, or None for K_t; no gradient flows to them.
        student_scale: None means head_dim ** -0.5.
        teacher_scale: None means head_dim ** -0.5.
        visibility: which keys each query sees.
        found: what the forward of an earlier call with the same values found, or an empty list to put it in.

    Returns:
        float32, float64 for float64 inputs, 0 on rows that see nothing. Under autocast float32 inputs are multiplied in
        its dtype.

    Raises:
        ValueError: a scale that is not above 0.
    """
    scales = scales_of(student[0].shape[-1], student_scale, teacher_scale)
    sides = (*student, *(None if x is None else x.detach() for x in teacher))
    tensors = [None if x is None else _unit_last_stride(as_multiplied(x)) for x in sides]
    borders = (None if x is None else x.contiguous() for x in visibility.tensors)
    if torch.compiler.is_compiling():
        found = None  # the compiler decides what is computed again
    kl: torch.Tensor = _RowKL.apply(*tensors, *scales, visibility.causal, *borders, found)
    return kl


class _RowKL(torch.autograd.Function):
    """`_forward` and `_backward`, with what the one has to keep for the other."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *inputs, found = arguments
        if found:
            kl, parts = found  # [batch, n_heads, n]; [4, batch, n_heads, n] of the Triton kernels, else empty
            kl = kl.clone()  # autograd writes into an output
        else:
            run: Any = _forward_op if torch.compiler.is_compiling() else _forward
            kl, parts = run(*inputs)
            if found is not None:
                found += (kl.detach(), parts)
        *tensors, student_scale, teacher_scale, causal, document, first, end = inputs
        ctx.save_for_backward(*tensors, parts, document, first, end)
        ctx.settings = (student_scale, teacher_scale, causal)
        return kl

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, document, first, end = ctx.saved_tensors
        run: Any = _backward_op if torch.compiler.is_compiling() else _backward
        grad_q, grad_k = run(grad, *tensors, *ctx.settings, document, first, end)
        # one for each argument of `forward`: a gradient to the student's queries and keys alone
        return grad_q, None if tensors[1] is None else grad_k, *(None,) * 9


def _unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    """`x` as it is, or a contiguous copy where the features of a token are not neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(
    student_q: torch.Tensor,
    student_k: torch.Tensor | None,
    teacher_q: torch.Tensor,
    teacher_k: torch.Tensor | None,
    student_scale: float,
    teacher_scale: float,
    causal: bool,
    document: torch.Tensor | None,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL, and the parts of its softmaxes that the backward of the Triton kernels needs."""
    keys = (student_q if student_k is None else student_k, teacher_q if teacher_k is None else teacher_k)
    inputs = (student_q, keys[0], teacher_q, keys[1], student_scale, teacher_scale)
    visibility = Visibility(causal, document, first, end)
    if not student_q.numel():
        return _empty(student_q)
    if runs_on_triton(student_q):
        given = [x for x in (student_q, student_k, teacher_q, teacher_k) if x is not None]
        if runs_on_hopper(given, visibility):
            from .hopper_forward import row_kl_forward
        else:
            from .triton_forward import row_kl_forward
        with torch.cuda.device_of(student_q):  # Triton launches on the current GPU
            return row_kl_forward(*inputs, visibility)
    from .chunked import row_kl_forward as chunked

    # the inputs have been cast; autocast would also cast products, which are float32
    with torch.autocast(student_q.device.type, enabled=False):
        kl = chunked(*inputs, visibility)
    return kl, kl.new_empty(0)  # the chunked backward needs no parts


_forward_op = torch.library.custom_op("rope_kernels::row_kl", _forward, mutates_args=())


@_forward_op.register_fake
def _(student_q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(student_q)


def _empty(student_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the forward, unwritten."""
    dtype = torch.float64 if student_q.dtype == torch.float64 else torch.float32
    kl = student_q.new_empty(student_q.shape[:3], dtype=dtype)
    return kl, kl.new_empty(4, *kl.shape) if runs_on_triton(student_q) else kl.new_empty(0)


def _backward(
    grad: torch.Tensor,
    student_q: torch.Tensor,
    student_k: torch.Tensor | None,
    teacher_q: torch.Tensor,
    teacher_k: torch.Tensor | None,
    parts: torch.Tensor,
    student_scale: float,
    teacher_scale: float,
    causal: bool,
    document: torch.Tensor | None,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients to student_q, with that to student_k in it where they are one, and to student_k."""
    visibility = Visibility(causal, document, first, end)
    scales = (student_scale, teacher_scale)
    if not student_q.numel():
        return _empty_gradients(student_q, student_k)
    if runs_on_triton(student_q):
        with torch.cuda.device_of(student_q):  # Triton launches on the current GPU
            if student_k is None or teacher_k is None:  # each row is a query and a key
                if runs_on_hopper([student_q, teacher_q], visibility):
                    from .hopper_relation_backward import relation_kl_backward
                else:
                    from .triton_relation_backward import relation_kl_backward
                both = relation_kl_backward(grad, student_q, teacher_q, parts, *scales, visibility)
                return both, both.new_empty(0)
            from .triton_attention_backward import attention_map_kl_backward

            return attention_map_kl_backward(
                grad, student_q, student_k, teacher_q, teacher_k, parts, *scales, visibility
            )
    from .chunked import row_kl_backward

    if student_k is None or teacher_k is None:
        as_query, as_key = row_kl_backward(grad, student_q, student_q, teacher_q, teacher_q, *scales, visibility)
        return as_query.add_(as_key), as_key.new_empty(0)
    return row_kl_backward(grad, student_q, student_k, teacher_q, teacher_k, *scales, visibility)


_backward_op = torch.library.custom_op("rope_kernels::row_kl_backward", _backward, mutates_args=())


@_backward_op.register_fake
def _(
    grad: torch.Tensor, student_q: torch.Tensor, student_k: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_gradients(student_q, student_k)


def _empty_gradients(student_q: torch.Tensor, student_k: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the backward, unwritten, in the layouts of the inputs: torch.compile lays out memory by this."""
    return torch.empty_like(student_q), student_q.new_empty(0) if student_k is None else torch.empty_like(student_k)
