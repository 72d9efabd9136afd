"""The document's blocks change places in RoPE's eyes, while tokens and causality stay."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey, between
from .base import VIEWS, Parameters, View
from .options import require_indexable, require_int


@VIEWS.register("chunk-permute")
@dataclass(frozen=True)
class ChunkPermute(View):
    """r(t) = C pi(t div C) + t mod C with C = ceil(L / blocks), pi a uniform permutation of the blocks of L tokens.

    pi is drawn anew for each document: block b goes where its random word stands among those of all blocks. A last
    block that is not full leaves a gap where it is moved to. Tokens that are decoded behind the L tokens keep r(t) = t.

    Args:
        blocks: how many, 2 to 64. The paper speaks of large blocks and names no size; 8 is ours.

    When: Take it as an ablation of the skip in self-distillation.

    Source: RPSD, arXiv:2604.14339, its chunked permutation of indices.
    """

    blocks: int = 8

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_int(self, "blocks", self.blocks, 2, 64)

    def check_length(self, length: int) -> None:
        require_indexable(self, length + -(-length // self.blocks))

    def reach(self, length: int, last: int | None = None) -> int:
        # a last block that is not full may come first, which leaves its gap before the others
        return (length - 1 if last is None else last) + -length % -(-length // self.blocks)

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        chunk = (length + self.blocks - 1) // self.blocks
        there = [block * chunk < length for block in range(self.blocks)]
        words = [between(word, 0, 2**31 - 2) for word in key.words(range(self.blocks))]
        places = {}
        for b, word in enumerate(words):
            before = [(other < word) | ((other == word) & (j < b)) for j, other in enumerate(words)]
            places[f"block_{b}"] = torch.stack([x & y for x, y in zip(before, there, strict=True)]).sum(0)
        return {"chunk": chunk, "length": length, **places}

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        chunk = parameters["chunk"]
        block = torch.div(t, chunk, rounding_mode="floor")
        moved = block
        for b in range(self.blocks):
            moved = torch.where(block == b, parameters[f"block_{b}"].to(block.dtype), moved)
        return torch.where((t >= 0) & (t < parameters["length"]), t + (moved - block) * chunk, t)
