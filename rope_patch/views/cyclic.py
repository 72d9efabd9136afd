"""The document is read from another starting index."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey
from .base import VIEWS, Parameters, View
from .options import require_effect, require_int


@VIEWS.register("cyclic")
@dataclass(frozen=True)
class Cyclic(View):
    """r(t) = (t + shift) mod L for a document of L tokens; attention stays causal in token order.

    Up to a constant, which RoPE does not see, this is a skip with split L - shift and skip -L. Tokens that are decoded
    after the L tokens of the first forward go on where the suffix stopped: r(t) = t + shift - L.

    Args:
        shift: u, in positions, 0 < u < L; None draws u ~ U{0..L-1} for each document, of which 0 changes nothing.

    When: Take it as an ablation of the skip in self-distillation.

    Source: RPSD, arXiv:2604.14339, the cyclic view q(u).
    """

    shift: int | None = None

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_int(self, "shift", self.shift, 0)
        require_effect(self, self.shift != 0, "shift=0 turns nothing: give another, or None to draw one.")

    def check_length(self, length: int) -> None:
        if self.shift is not None and self.shift >= length:
            raise ValueError(
                f"view 'cyclic': shift must be below the number of tokens in the sequence, got shift={self.shift} for "
                f"{length} tokens. Use a smaller shift, or None to draw one within each document."
            )

    def reach(self, length: int, last: int | None = None) -> int:
        return length - 1 if last is None else last

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        if self.shift is None:
            return {"shift": key.integers(0, length - 1, slot=0), "length": length}
        # a document shorter than the shift turns by the remainder, as the formula's modulus says
        return {"shift": self.shift % length, "length": length}

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        return length > 1 if self.shift is None else self.shift % length != 0

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if self.shift is not None:
            return (t >= length - self.shift % length).double()
        return t / length.double()  # u is one of L - t .. L - 1

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        turned = t + parameters["shift"]
        return torch.where(turned < parameters["length"], turned, turned - parameters["length"])
