"""The tokens of a cue weigh less than the text before it."""

from dataclasses import dataclass

import torch

from .labelled import Labelled


@dataclass(frozen=True, kw_only=True)
class CueWeight:
    """Cross-entropies of a document's last `tokens` tokens count `weight` times; the divisor stays their number.

    Args:
        tokens: b, of the cue.
        weight: w_cue, at least 0. The paper wants it "smaller but nonzero", its code has 1.

    Source: EndPrompt, its loss.
    """

    tokens: int
    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"cue_weight must be a number of at least 0, got {self.weight!r}.")

    def factors(self, labelled: Labelled) -> torch.Tensor:
        """What each query's label counts, [batch, n]."""
        in_cue = labelled.t + 1 >= labelled.documents.length - self.tokens
        return torch.where(in_cue, self.weight, 1.0)
