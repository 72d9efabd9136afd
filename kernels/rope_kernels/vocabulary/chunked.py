"""`linear_ce_kl` over chunks of rows: logits exist for some at a time, and gradients are formed beside the loss."""

from typing import Any, NamedTuple

import torch

from ..common.devices import runs_on_triton
from ..common.gpu_memory import free_gpu_bytes
from .checks import IGNORE_INDEX
from .rows import Direction, HeadOutput, vocabulary_rows


class Teacher(NamedTuple):
    """Another model's hidden states and head, constants."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class LinearCEKL(torch.autograd.Function):
    """Gradients of the scalar are formed in the forward; the backward scales them by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_std: torch.Tensor,
        hidden_view: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        ce_weight: torch.Tensor,
        kl_weight: torch.Tensor | None,
        direction: Direction,
        head: HeadOutput,
        ce_reference: torch.Tensor | None,
        ce_cap: float,
        teacher: Teacher | None,
        chunk_rows: int | None,
    ) -> tuple[torch.Tensor, ...]:
        exact = torch.float64 if hidden_std.dtype == torch.float64 else torch.float32
        ce_weight = ce_weight.to(exact)
        kl_weight = torch.zeros_like(ce_weight) if kl_weight is None else kl_weight.to(exact)
        # rows weigh 1 at most, so that small weights do not vanish in 16 bits; the backward multiplies again
        unit = torch.maximum(ce_weight.abs().max(), kl_weight.abs().max()) if len(labels) else ce_weight.new_ones(())
        unit = torch.where(unit > 0, unit, 1.0)
        scaled_ce, scaled_kl = ce_weight / unit, kl_weight / unit
        ce, kl, entropy = (torch.zeros_like(ce_weight) for _ in range(3))  # [N]
        is_top1 = torch.zeros_like(labels, dtype=torch.bool)
        ce_factor = torch.ones_like(ce_weight)
        reference = None if ce_reference is None else ce_reference.to(exact)
        wants_std, wants_view, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        grad_std = torch.zeros_like(hidden_std) if wants_std else None
        grad_view = torch.zeros_like(hidden_view) if hidden_view is not None and wants_view else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and wants_bias else None
        in_rows = vocabulary_rows
        if runs_on_triton(hidden_std):
            from .triton_rows import vocabulary_rows as in_rows
        labelled, on_view = labels != IGNORE_INDEX, kl_weight != 0
        # with a teacher the rows of the KL do not hold the standard view, so labels need a pass of their own
        alone = labelled if teacher is not None else labelled & ~on_view
        for both, rows in ((False, alone), (True, on_view)):
            index = rows.nonzero().squeeze(1)
            if not len(index):
                continue
            taught = teacher if both else None
            sides = 2 if both else 1
            n_rows = chunk_rows or _rows_at_a_time(weight, sides)  # of each side
            # one buffer for all chunks
            logits = weight.new_empty(sides * min(n_rows, len(index)), weight.shape[0], dtype=exact)
            for chunk in index.split(n_rows):
                n = len(chunk)
                if not both:
                    hidden = hidden_std[chunk]
                    _product(hidden, weight, bias, logits[:n])
                elif taught is None:
                    assert hidden_view is not None
                    hidden = torch.cat([hidden_std[chunk], hidden_view[chunk]])
                    _product(hidden, weight, bias, logits[: 2 * n])
                else:
                    assert hidden_view is not None
                    hidden = hidden_view[chunk]
                    # the teacher stands in place of the standard view, without labels, and its gradient is dropped
                    _product(taught.hidden[chunk], taught.weight, taught.bias, logits[:n])
                    _product(hidden, weight, bias, logits[n : 2 * n])
                metrics, gradient = in_rows(
                    logits[: sides * n],
                    torch.full_like(chunk, IGNORE_INDEX) if taught is not None else labels[chunk],
                    scaled_ce[chunk],
                    scaled_kl[chunk],
                    direction,
                    head,
                    weight.dtype if any(ctx.needs_input_grad) else None,
                    None if reference is None else reference[chunk],
                    ce_cap,
                )
                if both:
                    kl[chunk] = metrics.kl
                targets = [(grad_std, slice(0, n)), (grad_view, slice(n, 2 * n))][:sides]
                if taught is not None:
                    gradient, targets = gradient[n:], [(grad_view, slice(0, n))]  # none to the teacher
                else:
                    ce[chunk], entropy[chunk] = metrics.ce, metrics.entropy
                    is_top1[chunk], ce_factor[chunk] = metrics.is_top1, metrics.ce_factor
                if grad_bias is not None:
                    grad_bias += gradient.sum(0, dtype=exact)
                if any(grad is not None for grad, _ in targets):
                    back = gradient @ weight  # [sides n, H]
                    for grad, part in targets:
                        if grad is not None:
                            grad[chunk] = back[part]
                if grad_weight is not None:
                    _add_product(grad_weight, gradient.t(), hidden)  # [V, H]
            del logits, gradient
        ctx.save_for_backward(
            grad_std,
            grad_view,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            unit,
        )
        loss = (ce_weight * ce_factor * ce + kl_weight * kl).sum()
        ctx.mark_non_differentiable(ce, kl, entropy, is_top1, ce_factor)
        return loss, ce, kl, entropy, is_top1, ce_factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        *grads, unit = ctx.saved_tensors
        factor = grad * unit
        return (*(None if g is None else (g * factor).to(g.dtype) for g in grads), *(None,) * 9)  # 9 constants


def _product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write products of rows and head, [n, V], in the dtype of `out`, in which tensor cores accumulate anyway."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    elif hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(hidden @ weight.t())
    if bias is not None:
        out.add_(bias)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left` @ `right` to `total`, accumulated in its dtype."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _rows_at_a_time(weight: torch.Tensor, sides: int) -> int:
    """Rows whose float32 logits of `sides` views fit into a quarter of the free memory, or near the caches of a CPU."""
    room = 2**26
    if weight.is_cuda:
        unused = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
        # more rows at a time than this save no time
        room = min(5 * 2**28, (free_gpu_bytes(weight.device) + unused) // 4)
    rows = room // (4 * weight.shape[0])
    # products of 2048 rows fill an H200's 132 multiprocessors with tiles, at a hidden size of 2048 as of 4096
    for unit in (2048, 128, sides):
        if rows >= unit:
            return rows // unit * unit // sides
    return 1
