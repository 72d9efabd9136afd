"""Cross-entropy of the standard view and KL of a view to it, in one sweep over the vocabulary, gradients included."""

from typing import Any, NamedTuple, get_args

import torch

from ..common.autocast import as_multiplied, whole
from ..common.checks import (
    IGNORE_INDEX,
    described,
    require_chunk_rows,
    require_head,
    require_labels,
    require_positive,
    require_tensor,
)
from ..row_kl.custom_op import runs_on_triton
from .rows import Direction, HeadOutput, RowMetrics, vocabulary_rows


def linear_ce_kl(
    hidden_std: torch.Tensor,
    hidden_view: torch.Tensor | None,
    weight: torch.Tensor,
    labels: torch.Tensor,
    ce_weight: torch.Tensor,
    kl_weight: torch.Tensor | None,
    direction: Direction = "reverse",
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ce_reference: torch.Tensor | None = None,
    ce_cap: float = 5.0,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, RowMetrics]:
    """sum_i f_i ce_weight_i CE_i + kl_weight_i KL_i, without the logits of all rows.

    With z = softcap tanh(logit_scale (h W^T + b) / softcap), q = softmax(z) of `hidden_std` and p of `hidden_view`:

        CE_i = -ln q_i[labels_i]
        f_i = min(e^(ce_reference_i - CE_i), ce_cap), a constant; 1 without a reference
        KL_i = KL(p_i || q_i) for "reverse", KL(q_i || p_i) for "forward", their Jensen-Shannon divergence for "jsd"

    With a teacher the q of the KL is that of `teacher_hidden` and its head, and CE stays as it is.

    q is a constant in the KL: gradients flow to `hidden_std` from the CE alone, to `hidden_view` from the KL alone, to
    `weight` and `bias` from both, through p alone in the KL. They are formed in the forward, chunk by chunk: each
    hidden state meets the head once, 6 products of [N, H] x [H, V] in all, 4 with a frozen head, one more with a
    teacher. Softmaxes are float32.

    Row weights carry every divisor and coefficient; rows with neither label nor weight are never multiplied, and only
    rows with a KL weight are on the view's side.

    Args:
        hidden_std: [N, H], floating point.
        hidden_view: [N, H], or None with `kl_weight` None: cross-entropy alone.
        weight: [V, H], the head, of the dtype and device of `hidden_std`.
        labels: [N] int64 in [0, V), -100 for none; row i predicts labels[i].
        ce_weight: [N], what each cross-entropy counts, constants.
        kl_weight: [N] or None, what each KL counts, constants.
        direction: "reverse" (RPSD), "forward" or "jsd".
        bias: [V] or None.
        logit_scale: factor of the products, above 0.
        softcap: bound of the logits, as Gemma has it, above 0.
        ce_reference: [N] or None, nan for rows that have none: LongCE's cross-entropy of the same tokens in a short
            context, in nats, constants.
        ce_cap: LongCE's gamma, above 0.
        teacher_hidden: [N, H_t] or None, of another model, constants, in the dtype of `teacher_weight`.
        teacher_weight: [V, H_t], its head; None without `teacher_hidden`.
        teacher_bias: [V] or None.
        chunk_rows: rows whose logits exist at a time. None: what a quarter of free memory holds, 1.25 GiB at most
            or, on a CPU, 64 MiB.

    Returns:
        The scalar, float32 (float64 for float64 inputs), and `RowMetrics` of all rows. A nan or an infinity in a row
        that counts makes the scalar nan or infinite; a word whose logit is -inf is masked, with probability 0.

    Under autocast float32 hidden states and heads are multiplied in its dtype, logits are float32 nevertheless.

    Raises:
        ValueError: a shape, dtype, device, label or option is not as above.

    Source: RPSD, arXiv:2604.14339, Eq. 3 and 6, its loss; rows and divisors are the caller's. LongCE, arXiv:2410.23771,
        for f.
    """
    require_head("hidden_std", hidden_std, "weight", weight, "bias", bias)
    require_labels(labels, "hidden_std", hidden_std, len(weight))
    _require(hidden_std, hidden_view, ce_weight, kl_weight, ce_reference, direction)
    require_chunk_rows(chunk_rows)
    require_positive("ce_cap", ce_cap, bounded=False)
    head = HeadOutput(logit_scale, softcap)
    teacher = _teacher(teacher_hidden, teacher_weight, teacher_bias, hidden_view, weight)
    hidden_std, hidden_view = as_multiplied(hidden_std), as_multiplied(hidden_view)
    # FSDP2 shards the head: gathered once, for all chunks
    weight = as_multiplied(whole(weight))
    bias = None if bias is None else as_multiplied(whole(bias))
    if not torch.is_grad_enabled():
        # the forward forms the gradients of what requires one, whether or not a backward can follow
        hidden_std, weight = hidden_std.detach(), weight.detach()
        hidden_view, bias = (None if x is None else x.detach() for x in (hidden_view, bias))
    with torch.autocast(hidden_std.device.type, enabled=False):
        loss, *metrics = _LinearCEKL.apply(
            hidden_std,
            hidden_view,
            weight,
            bias,
            labels,
            ce_weight,
            kl_weight,
            direction,
            head,
            ce_reference,
            ce_cap,
            teacher,
            chunk_rows,
        )
    return loss, RowMetrics(*metrics)


class _Teacher(NamedTuple):
    """Another model's hidden states and head, constants."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class _LinearCEKL(torch.autograd.Function):
    """Gradients of the scalar are formed in the forward; the backward multiplies them by what comes in."""

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
        teacher: "_Teacher | None",
        chunk_rows: int | None,
    ) -> tuple[torch.Tensor, ...]:
        exact = torch.float64 if hidden_std.dtype == torch.float64 else torch.float32
        ce_weight = ce_weight.to(exact)
        kl_weight = torch.zeros_like(ce_weight) if kl_weight is None else kl_weight.to(exact)
        # rows weigh 1 at most, so that small weights do not vanish in 16 bits; the backward multiplies again
        unit = torch.maximum(ce_weight.abs().max(), kl_weight.abs().max()) if len(labels) else ce_weight.new_ones(())
        unit = torch.where(unit > 0, unit, 1.0)
        scaled_ce, scaled_kl = ce_weight / unit, kl_weight / unit
        ce, kl, entropy = (torch.zeros_like(ce_weight) for _ in range(3))
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
        # a teacher takes the place of the standard view in the KL, which then says nothing of labels
        alone = labelled if teacher is not None else labelled & ~on_view
        for both, rows in ((False, alone), (True, on_view)):
            index = rows.nonzero().squeeze(1)
            if not len(index):
                continue
            taught = teacher if both else None
            sides = 2 if both else 1
            n_rows = chunk_rows or _rows_at_a_time(weight, sides)
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
                    _product(taught.hidden[chunk], taught.weight, taught.bias, logits[:n])
                    _product(hidden, weight, bias, logits[n : 2 * n])
                found, gradient = in_rows(
                    logits[: sides * n],
                    torch.full_like(chunk, IGNORE_INDEX) if taught is not None else labels[chunk],
                    scaled_ce[chunk],
                    scaled_kl[chunk],
                    direction,
                    head,
                    weight.dtype,
                    None if reference is None else reference[chunk],
                    ce_cap,
                )
                if both:
                    kl[chunk] = found.kl
                targets = [(grad_std, slice(0, n)), (grad_view, slice(n, 2 * n))][:sides]
                if taught is not None:
                    gradient, targets = gradient[n:], [(grad_view, slice(0, n))]
                else:
                    ce[chunk], entropy[chunk] = found.ce, found.entropy
                    is_top1[chunk], ce_factor[chunk] = found.is_top1, found.ce_factor
                if grad_bias is not None:
                    grad_bias += gradient.sum(0, dtype=exact)
                if any(grad is not None for grad, _ in targets):
                    back = gradient @ weight
                    for grad, part in targets:
                        if grad is not None:
                            grad[chunk] = back[part]
                if grad_weight is not None:
                    _add_product(grad_weight, gradient.t(), hidden)
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
        return (*(None if g is None else (g * factor).to(g.dtype) for g in grads), *(None,) * 9)


def linear_ce_kl_ref(
    hidden_std: torch.Tensor,
    hidden_view: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    ce_weight: torch.Tensor,
    kl_weight: torch.Tensor,
    direction: Direction = "reverse",
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference twin of `linear_ce_kl`'s scalar: all logits at once, in the dtype of the inputs, through autograd."""

    def log_probabilities(
        hidden: torch.Tensor, weight: torch.Tensor = weight, bias: torch.Tensor | None = bias
    ) -> torch.Tensor:
        z = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
        return (z if softcap is None else softcap * torch.tanh(z / softcap)).log_softmax(-1)

    log_q, log_p = log_probabilities(hidden_std), log_probabilities(hidden_view)
    ce = torch.nn.functional.nll_loss(log_q, labels, ignore_index=IGNORE_INDEX, reduction="none")
    if teacher_hidden is not None:
        assert teacher_weight is not None
        log_q = log_probabilities(teacher_hidden, teacher_weight, teacher_bias)
    log_q = log_q.detach()
    if direction == "reverse":
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    elif direction == "forward":
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    else:
        log_m = ((log_p.exp() + log_q.exp()) / 2).log()
        kl = ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2
    return (ce_weight * ce + kl_weight * kl).sum()


def _teacher(
    hidden: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    hidden_view: torch.Tensor | None,
    own_weight: torch.Tensor,
) -> _Teacher | None:
    """What was given of a teacher, in the dtype that it is multiplied in, or None.

    Raises:
        ValueError: it does not fit.
    """
    if hidden is None or weight is None:
        if not (hidden is None and weight is None and bias is None):
            raise ValueError("teacher_hidden and teacher_weight go together, and teacher_bias with them.")
        return None
    require_head("teacher_hidden", hidden, "teacher_weight", weight, "teacher_bias", bias)
    if hidden_view is None or len(hidden) != len(hidden_view) or hidden.device != hidden_view.device:
        raise ValueError(
            "teacher_hidden must be [N, H_t], N and device as in hidden_view, got "
            f"{described(hidden)} for {described(hidden_view)}."
        )
    if len(weight) != len(own_weight):
        raise ValueError(
            f"teacher_weight must be [{len(own_weight)}, {hidden.shape[1]}], one vocabulary for both, got "
            f"{described(weight)}."
        )
    weight = whole(weight.detach())
    bias = None if bias is None else as_multiplied(whole(bias.detach()))
    return _Teacher(as_multiplied(hidden.detach()), as_multiplied(weight), bias)


def _product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Products of rows and head, [n, V], in the dtype of `out`, which tensor cores accumulate in anyway."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    elif hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(hidden @ weight.t())
    return out if bias is None else out.add_(bias)


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
        free, _ = torch.cuda.mem_get_info(weight.device)
        unused = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
        # more rows at a time than this save no time
        room = min(5 * 2**28, (free + unused) // 4)
    rows = room // (4 * weight.shape[0])
    # products of 2048 rows fill an H200's 132 multiprocessors with tiles, at a hidden size of 2048 as of 4096
    for unit in (2048, 128, sides):
        if rows >= unit:
            return rows // unit * unit // sides
    return 1


def _require(
    hidden_std: torch.Tensor,
    hidden_view: torch.Tensor | None,
    ce_weight: torch.Tensor,
    kl_weight: torch.Tensor | None,
    ce_reference: torch.Tensor | None,
    direction: str,
) -> None:
    if (hidden_view is None) != (kl_weight is None):
        raise ValueError("hidden_view and kl_weight must both be given, or both be None for cross-entropy alone.")
    if hidden_view is not None:
        require_tensor("hidden_view", hidden_view, f"{described(hidden_std)} as hidden_std is")
        if (
            hidden_view.shape != hidden_std.shape
            or hidden_view.dtype != hidden_std.dtype
            or hidden_view.device != hidden_std.device
        ):
            raise ValueError(
                f"hidden_view must be {described(hidden_std)} as hidden_std is, got {described(hidden_view)}."
            )
    allowed = f"[{len(hidden_std)}] floating point on {hidden_std.device}"
    for name, tensor in (("ce_weight", ce_weight), ("kl_weight", kl_weight), ("ce_reference", ce_reference)):
        if tensor is None and name != "ce_weight":
            continue
        require_tensor(name, tensor, allowed)
        assert tensor is not None
        if tensor.shape != (len(hidden_std),) or not tensor.is_floating_point() or tensor.device != hidden_std.device:
            raise ValueError(f"{name} must be {allowed}, got {described(tensor)}.")
        if tensor.requires_grad:
            raise ValueError(f"{name} is a constant here: detach it.")
    if direction not in get_args(Direction):
        raise ValueError(f"direction must be one of {get_args(Direction)}, got {direction!r}.")
