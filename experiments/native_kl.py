"""How far a model's predictions are from those of the model that it was made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch


@torch.no_grad()
def kl_from(native: Any, model: Any, texts: Iterable[Sequence[int]]) -> float:
    """KL(native || model) of next-token predictions in nats, mean over the tokens of `texts`, which are token ids."""
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([list(text)], device=model.device)
        log_probs = [m(input_ids=ids).logits[0].float().log_softmax(-1) for m in (native, model)]
        total += float((log_probs[0].exp() * (log_probs[0] - log_probs[1])).sum())
        tokens += len(text)
    return total / tokens
