"""Cross-entropy of the standard view and KL of a view to it, in one sweep over the vocabulary, gradients included."""

from typing import get_args

import torch

from ..common.autocast import as_multiplied, whole
from ..common.checks import described, require_positive, require_tensor
from .checks import require_chunk_rows, require_head, require_labels
from .chunked import LinearCEKL, Teacher
from .rows import Direction, HeadOutput, RowMetrics


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
        loss, *metrics = LinearCEKL.apply(
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


def _teacher(
    hidden: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    hidden_view: torch.Tensor | None,
    own_weight: torch.Tensor,
) -> Teacher | None:
    """The teacher's arguments in the dtype that they are multiplied in, or None where there is no teacher.

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
    return Teacher(as_multiplied(hidden.detach()), as_multiplied(weight), bias)


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
