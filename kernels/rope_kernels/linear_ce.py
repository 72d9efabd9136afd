"""Cross-entropy of each row from the last hidden states, without the logits of all rows at once."""

import torch
from torch.nn import functional as F

IGNORE_INDEX = -100  # torch's and Transformers' label of a token without a loss


@torch.no_grad()
def linear_ce_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """ce[i] = -ln softmax(hidden[i] @ weight.T + bias)[labels[i]], in nats, 0 where labels[i] is -100.

    For evaluation: no gradient flows. The product runs in the dtype of `hidden`, its log-sum-exp in float32, and the
    rows without a label are never multiplied. What the model does to its logits (a scale, a soft cap) is not applied.

    Args:
        hidden: [N, H], floating point.
        weight: [V, H], of the dtype and device of `hidden`.
        labels: [N] int64, each in [0, V) or -100; already shifted, so that row i predicts labels[i].
        bias: [V] or None.
        chunk_rows: rows whose logits exist at a time, at least 1. None takes as many as hold float32 logits of 256 MiB.

    Returns:
        [N] float32.

    Raises:
        ValueError: a shape, a dtype, a label or `chunk_rows` is not as above.
    """
    require_rows("hidden", hidden, weight, labels, bias)
    vocab_size = weight.shape[0]
    if chunk_rows is None:
        chunk_rows = max(1, 2**28 // (4 * max(1, vocab_size)))
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1 or None, got {chunk_rows}.")

    ce = torch.zeros(hidden.shape[0], device=hidden.device, dtype=torch.float32)
    labelled = (labels != IGNORE_INDEX).nonzero().squeeze(1)
    for rows in labelled.split(chunk_rows):
        logits = F.linear(hidden[rows], weight, bias).float()  # [chunk, V]
        ce[rows] = logits.logsumexp(dim=-1) - logits.gather(1, labels[rows, None]).squeeze(1)
    return ce


def linear_ce_rows_ref(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference twin of `linear_ce_rows`: all logits at once, computed and returned in the dtype of `hidden`."""
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, ignore_index=IGNORE_INDEX, reduction="none")


def require_rows(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Refuse rows, a head and labels that do not fit, `name` being that of `hidden`.

    Raises:
        ValueError: see above.
    """
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(f"{name} must be [N, H] and floating point, got {described(hidden)}.")
    n_rows, hidden_size = hidden.shape
    if weight.ndim != 2 or weight.shape[1] != hidden_size:
        raise ValueError(f"weight must be [V, H] with H = {hidden_size} as in {name}, got {described(weight)}.")
    vocab_size = weight.shape[0]
    if bias is not None and bias.shape != (vocab_size,):
        raise ValueError(f"bias must be None or [V] with V = {vocab_size} as in weight, got {described(bias)}.")
    for other, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype != hidden.dtype or tensor.device != hidden.device):
            raise ValueError(
                f"{other} must be {hidden.dtype} on {hidden.device} as {name} is, got {described(tensor)}."
            )
    if labels.shape != (n_rows,) or labels.dtype != torch.int64 or labels.device != hidden.device:
        raise ValueError(f"labels must be [{n_rows}] int64 on {hidden.device} as {name} is, got {described(labels)}.")
    # checked here because a label out of range ends the whole CUDA context with a device-side assert
    wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocab_size))]
    if wrong.numel():
        raise ValueError(f"labels must be in [0, {vocab_size}) or {IGNORE_INDEX}, got {wrong[0].item()}.")


def described(tensor: torch.Tensor) -> str:
    """Shape, dtype and device, for messages."""
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
