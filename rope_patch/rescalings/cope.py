"""Clipped RoPE: the slowest frequencies fade to 0."""

import math
from dataclasses import dataclass

import torch

from ..base import papers
from ..base.validators import require_integer
from .base import RESCALINGS, NativeRope, WindowAsOption, require_window


@RESCALINGS.register("cope")
@dataclass(frozen=True)
class CoPE(WindowAsOption):
    """theta'_j = theta_j 0.5 (1 + cos(pi i / (n - 1))) for the slowest n pairs, i = 0..n-1 from the fastest of them.

    The first of the n pairs keeps its frequency, the last stops. The others are kept.

    Args:
        n: pairs that fade, 2 to d/2. The authors' code takes 20 of the 64 of Llama-3-8B.
        max_position_embeddings: target window for the config, in positions; None keeps the trained one.

    When: Use it to reproduce CoPE, with training; it was not measured here.

    Source: CoPE (clipped RoPE), arXiv:2602.05258, soft clipping; saved as rope_type "longrope" with equal factors.
    """

    n: int
    max_position_embeddings: int | None = None

    cites = (papers.COPE,)
    synonyms = ("clipped-rope", "soft-clipping")

    def __post_init__(self) -> None:
        require_integer("rescaling 'cope': n", self.n, least=2)
        require_window(self, "max_position_embeddings", self.max_position_embeddings)

    def frequencies(self, theta: torch.Tensor, native: NativeRope) -> torch.Tensor:
        require_integer("rescaling 'cope': n, for this model,", self.n, most=len(theta))
        fade = 0.5 * (1 + torch.cos(torch.linspace(0, math.pi, self.n, dtype=theta.dtype)))
        return torch.cat([theta[: -self.n], theta[-self.n :] * fade])
