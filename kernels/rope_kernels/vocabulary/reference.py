"""Reference twins of the vocabulary's operators: the formulas with all logits at once, in plain torch."""

import torch
from torch.nn import functional as F

from .checks import IGNORE_INDEX
from .rows import Direction


def linear_ce_rows_ref(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference twin of `linear_ce_rows`: all logits at once, computed and returned in the dtype of `hidden`."""
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, ignore_index=IGNORE_INDEX, reduction="none")


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
    # [N, V] each: q of the standard view, p of the view
    log_q = _log_probabilities(hidden_std, weight, bias, logit_scale, softcap)
    log_p = _log_probabilities(hidden_view, weight, bias, logit_scale, softcap)
    ce = F.nll_loss(log_q, labels, ignore_index=IGNORE_INDEX, reduction="none")
    if teacher_hidden is not None:
        assert teacher_weight is not None
        log_q = _log_probabilities(teacher_hidden, teacher_weight, teacher_bias, logit_scale, softcap)
    log_q = log_q.detach()  # the target of the divergence is held fixed
    if direction == "reverse":
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    elif direction == "forward":
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    else:
        log_m = ((log_p.exp() + log_q.exp()) / 2).log()  # of the mean of both
        kl = ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2
    return (ce_weight * ce + kl_weight * kl).sum()


def _log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> torch.Tensor:
    z = F.linear(hidden, weight, bias) * logit_scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)).log_softmax(-1)
