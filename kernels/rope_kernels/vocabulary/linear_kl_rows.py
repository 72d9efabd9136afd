"""KL between next-token distributions of two models, row by row, without the logits of all rows."""

import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from ..common.autocast import whole
from ..common.checks import described, require_positive
from .checks import require_head
from .rows import HeadOutput

_CHUNK_BYTES = 2**28  # of float32 logits of one side


def linear_kl_rows(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """KL(softmax(z_t / T) || softmax(z_s / T)) of each row, in nats, without T^2.

    z = softcap tanh(logit_scale (hidden weight^T + bias) / softcap), softcap None for none.

    Gradients flow to `student_hidden`, `student_weight` and `student_bias`. Logits exist for some rows at a time, in
    the forward and again in the backward; products run in the dtype of the hidden states, softmaxes in float32.

    Args:
        student_hidden: [N, H], floating point.
        teacher_hidden: [N, H_t], floating point, on the same device.
        student_weight: [V, H], of the dtype and device of `student_hidden`.
        teacher_weight: [V, H_t], of those of `teacher_hidden`.
        student_bias: [V] or None, of the dtype and device of `student_hidden`.
        teacher_bias: [V] or None, of the dtype and device of `teacher_hidden`.
        temperature: T, above 0.
        logit_scale: factor of the products, of both sides, above 0.
        softcap: bound of the logits, of both sides, above 0 or None.

    Returns:
        [N] float32, float64 for float64 inputs, nan or infinity where a row of hidden states holds one. A word whose
        logit is -inf is masked.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.

    Source: LinearARD, arXiv:2604.00004, its optional logit KL on the last positions.
    """
    for side, hidden, weight, bias in (
        ("student", student_hidden, student_weight, student_bias),
        ("teacher", teacher_hidden, teacher_weight, teacher_bias),
    ):
        require_head(f"{side}_hidden", hidden, f"{side}_weight", weight, f"{side}_bias", bias)
    if len(student_hidden) != len(teacher_hidden) or student_hidden.device != teacher_hidden.device:
        raise ValueError(
            "student_hidden and teacher_hidden must be [N, H] and [N, H_t] with one N on one device, got "
            f"{described(student_hidden)} and {described(teacher_hidden)}."
        )
    if len(student_weight) != len(teacher_weight):
        raise ValueError(
            f"student and teacher must have one vocabulary, got {len(student_weight)} and {len(teacher_weight)} rows."
        )
    require_positive("temperature", temperature)
    output = HeadOutput(logit_scale, softcap)
    n_rows = max(1, _CHUNK_BYTES // (4 * len(student_weight)))
    # FSDP2 shards heads: gathered once, for all chunks
    student_weight, student_bias = whole(student_weight), None if student_bias is None else whole(student_bias)
    # no detached aliases: ZeRO-3 takes weights away from parameters, and an alias would keep them until the backward
    with torch.no_grad():
        teacher_weight, teacher_bias = whole(teacher_weight), None if teacher_bias is None else whole(teacher_bias)
    teacher_hidden = teacher_hidden.detach()

    # of one chunk, [n]; its logits are formed again in the backward
    def rows(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            log_p = _log_probabilities(teacher, teacher_weight, teacher_bias, output, temperature)
        log_q = _log_probabilities(student, student_weight, student_bias, output, temperature)
        # 0 ln 0 is 0: a head may mask words with -inf
        return (log_p.exp() * torch.where(log_p != -torch.inf, log_p - log_q, 0.0)).sum(-1)

    parts = [
        checkpoint(rows, student, teacher, use_reentrant=False)
        for student, teacher in zip(student_hidden.split(n_rows), teacher_hidden.split(n_rows), strict=True)
    ]
    return torch.cat(parts)


def _log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: HeadOutput, temperature: float
) -> torch.Tensor:
    products = F.linear(hidden, weight, bias)
    dtype = torch.float64 if products.dtype == torch.float64 else torch.float32
    return (output.logits(products.to(dtype)) / temperature).log_softmax(-1)
