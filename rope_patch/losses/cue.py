"""EndPrompt's weight: the tokens of a cue count less than the text before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.validators import require_integer, require_number
from ..layout.documents import checked_cues, closing_tokens
from ..layout.labelled import Labelled


@dataclass(frozen=True, kw_only=True)
class CueWeight:
    """Cross-entropies of a document's last `tokens` tokens count `weight` times; the divisor stays their number.

    Args:
        tokens: b, of the cue, or a set of cues as token ids, as in `rope_patch.views.EndPrompt`.
        weight: w_cue, at least 0. The paper wants it "smaller but nonzero", its code has 1.

    Source: EndPrompt, its loss.
    """

    tokens: int | Sequence[Sequence[int]]
    weight: float

    def __post_init__(self) -> None:
        require_number("cue_weight", self.weight, least=0)
        if isinstance(self.tokens, int):
            require_integer("cue_tokens", self.tokens, least=1)
        else:
            checked_cues("cue_tokens", self.tokens, least=1)

    def factors(self, labelled: Labelled) -> torch.Tensor:
        """Weight of each query's label, [batch, n]."""
        n_tokens: int | torch.Tensor
        if isinstance(self.tokens, int):
            n_tokens = self.tokens
        else:
            n_tokens = closing_tokens(labelled.ids, labelled.drawn_at, labelled.documents, self.tokens)
        in_cue = labelled.t + 1 >= labelled.documents.length - n_tokens  # t + 1 is the token that query t predicts
        return torch.where(in_cue, self.weight, 1.0)
