"""Losses of rows of logits and their gradients in one go: next-token cross-entropy, and KL between two views."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..common.checks import require_positive
from .checks import IGNORE_INDEX

Direction = Literal["reverse", "forward", "jsd"]


@dataclass(frozen=True)
class HeadOutput:
    """Logits from the products of a head: z = softcap tanh(scale product / softcap).

    Args:
        scale: multiplies the products, above 0.
        softcap: bound that a tanh keeps them within, above 0, None for none.

    Raises:
        ValueError: a number is not as above.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", require_positive("logit_scale", self.scale))
        if self.softcap is not None:
            object.__setattr__(self, "softcap", require_positive("softcap", self.softcap, ", or None for none"))

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """Logits z of products."""
        logits = products * self.scale if self.scale != 1.0 else products
        if self.softcap is None:
            return logits
        # adds 0, or nan where a product is infinite, which the tanh would hide
        return torch.add(self.softcap * torch.tanh(logits / self.softcap), logits, alpha=0)

    def back(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Gradient to the products, given that to `logits`."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square())
        return gradient * self.scale if self.scale != 1.0 else gradient


@dataclass(frozen=True)
class RowMetrics:
    """Of each row, detached, float32 (float64 for float64 inputs).

    Args:
        ce: cross-entropy on the standard view, 0 without a label.
        kl: divergence of the view from the standard view, 0 where its weight is 0.
        entropy: of the standard view's distribution, 0 without a label.
        is_top1: bool, whether no logit of the standard view is above the label's.
        ce_factor: factor of the cross-entropy's weight by `ce_reference`, 1 where there is none.
    """

    ce: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    is_top1: torch.Tensor
    ce_factor: torch.Tensor


def ce_factors(ce: torch.Tensor, reference: torch.Tensor | None, cap: float) -> torch.Tensor:
    """min(e^(reference - ce), cap) of each row, 1 where `reference` is None or nan, nan where it is infinite."""
    if reference is None:
        return torch.ones_like(ce)
    return torch.where(reference.isnan(), 1.0, (reference - ce).exp().clamp(max=cap) + 0 * reference)


def vocabulary_rows(
    products: torch.Tensor,
    labels: torch.Tensor,
    ce_weight: torch.Tensor,
    kl_weight: torch.Tensor,
    direction: Direction,
    head: HeadOutput,
    dtype: torch.dtype | None,
    ce_reference: torch.Tensor | None = None,
    ce_cap: float = 1.0,
) -> tuple[RowMetrics, torch.Tensor]:
    """Metrics of each row, and the gradient of sum(ce_factor ce_weight ce + kl_weight kl) to the products.

    With q the distribution of the standard view, which the divergence holds fixed, p that of the view, m = (p + q) / 2:

        ce        d/dz_q = q - 1[label]
        reverse   KL(p || q)                            d/dz_p = p (ln p - ln q - KL)
        forward   KL(q || p)                            d/dz_p = p - q
        jsd       (KL(p || m) + KL(q || m)) / 2         d/dz_p = p (ln p - ln m - KL(p || m)) / 2

    Args:
        products: of hidden states and head, [2n, V] in float32 or float64, those of the standard view above those of
            the view, or [n, V] of the standard view where no row has a divergence; may be overwritten.
        labels: [n] int64, -100 for none.
        ce_weight: [n] of the dtype of `products`; ignored on rows without a label.
        kl_weight: [n] of the dtype of `products`.
        direction: of the divergence.
        head: turns products into logits.
        dtype: of the gradient; None if nobody wants it, and then it may be anything.
        ce_reference: [n] or None, as in `ce_factors`, whose values are constants.
        ce_cap: the largest factor, as `cap` in `ce_factors`.

    Returns:
        Metrics, and the gradient in the shape of `products`.
    """
    standard, *view = products.split(len(labels))  # [n, V] each
    labelled = labels != IGNORE_INDEX
    place = labels.clamp_min(0)[:, None]  # [n, 1]; -100 is no index
    z = head.logits(standard)
    log_q = z.log_softmax(-1)
    q = log_q.exp()
    ce = torch.where(labelled, -log_q.gather(1, place).squeeze(1), 0.0)
    # 0 ln 0 is 0: a head may mask words with -inf; nan is no 0, and stays
    entropy = torch.where(labelled, -torch.xlogy(q, q).sum(-1), 0.0)
    is_top1 = (z.gather(1, place).squeeze(1) >= z.amax(-1)) & labelled
    gradient = q.scatter_add(1, place, torch.full_like(place, -1, dtype=q.dtype))  # q - 1[label]
    factor = ce_factors(ce, ce_reference, ce_cap)
    gradient = head.back(gradient * torch.where(labelled, factor * ce_weight, 0.0)[:, None], z)
    if not view:
        return RowMetrics(ce, torch.zeros_like(ce), entropy, is_top1, factor), gradient.to(dtype=dtype)
    z = head.logits(view[0])
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    if direction == "reverse":
        gap = torch.where(p != 0, log_p - log_q, 0.0)
        kl = (p * gap).sum(-1)
        view_gradient = p * (gap - kl[:, None])
    elif direction == "forward":
        kl = (q * torch.where(q != 0, log_q - log_p, 0.0)).sum(-1)
        view_gradient = p - q
    else:
        log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=p.dtype))
        gap = torch.where(p != 0, log_p - log_m, 0.0)
        mean_gap = (p * gap).sum(-1)  # KL(p || m)
        kl = (mean_gap + (q * torch.where(q != 0, log_q - log_m, 0.0)).sum(-1)) / 2
        view_gradient = p * (gap - mean_gap[:, None]) / 2
    kl = torch.where(kl_weight != 0, kl, 0.0)
    view_gradient = head.back(view_gradient * kl_weight[:, None], z)
    return RowMetrics(ce, kl, entropy, is_top1, factor), torch.cat([gradient, view_gradient]).to(dtype=dtype)
