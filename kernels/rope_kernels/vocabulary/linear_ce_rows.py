"""Cross-entropy of each row from the last hidden states, without the logits of all rows at once."""

import torch
from torch.nn import functional as F

from ..common.devices import runs_on_triton
from .checks import IGNORE_INDEX, require_chunk_rows, require_head, require_labels
from .linear_ce_kl import linear_ce_kl


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

    For evaluation: no gradient flows. The product runs in the dtype of `hidden`, its log-sum-exp in float32, as are the
    logits on a GPU, and rows without a label are never multiplied. What the model does to its logits (a scale, a soft
    cap) is not applied.

    Args:
        hidden: [N, H], floating point.
        weight: [V, H], of the dtype and device of `hidden`.
        labels: [N] int64, each in [0, V) or -100; already shifted, so that row i predicts labels[i].
        bias: [V] or None.
        chunk_rows: rows whose logits exist at a time, at least 1. None: on a GPU as `linear_ce_kl` has it, else as many
            as hold float32 logits of 256 MiB.

    Returns:
        [N] float32. A nan or an infinity among hidden states gives nan or infinity; a logit of -inf is a masked word.

    Raises:
        ValueError: a shape, a dtype, a label or `chunk_rows` is not as above.
    """
    require_head("hidden", hidden, "weight", weight, "bias", bias)
    vocab_size = weight.shape[0]
    require_labels(labels, "hidden", hidden, vocab_size)
    require_chunk_rows(chunk_rows)
    if runs_on_triton(hidden):
        each = torch.ones_like(labels, dtype=torch.float32)
        return linear_ce_kl(hidden, None, weight, labels, each, None, bias=bias, chunk_rows=chunk_rows)[1].ce
    if chunk_rows is None:
        chunk_rows = max(1, 2**28 // (4 * vocab_size))

    ce = torch.zeros(hidden.shape[0], device=hidden.device, dtype=torch.float32)
    labelled = (labels != IGNORE_INDEX).nonzero().squeeze(1)
    for rows in labelled.split(chunk_rows):
        logits = F.linear(hidden[rows], weight, bias).float()  # [chunk, V]
        ce[rows] = logits.logsumexp(dim=-1) - logits.gather(1, labels[rows, None]).squeeze(1)
    return ce
