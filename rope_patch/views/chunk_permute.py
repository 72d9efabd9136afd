"""Blocks of the document in a random order of positions; tokens and the causal mask stay."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey, between
from ..base.validators import require_integer
from .base import VIEWS, Parameters, View


@VIEWS.register("chunk-permute")
@dataclass(frozen=True)
class ChunkPermute(View):
    """r(t) = C pi(t div C) + t mod C with C = ceil(L / blocks), pi a uniform permutation of the blocks of L tokens.

    pi is drawn anew for each document: the block with the smallest random number comes first. Where a last block that
    is not full is moved, it leaves a gap. Tokens that are decoded after the L tokens keep r(t) = t.

    Args:
        blocks: number of blocks, 2 to 64. The paper has large blocks of unnamed size; 8 is our choice.

    When: Take it as an ablation of the skip in self-distillation.

    Source: RPSD, arXiv:2604.14339, its chunked permutation of indices.
    """

    blocks: int = 8

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        require_integer("view 'chunk-permute': blocks", self.blocks, least=2, most=64)

    def reach(self, length: int, last: int | None = None) -> int:
        # a last block that is not full may come first, which leaves its gap before the others
        return (length - 1 if last is None else last) + -length % -(-length // self.blocks)

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        chunk = (length + self.blocks - 1) // self.blocks  # C, in tokens
        words = [between(word, 0, 2**31 - 2) for word in key.words(range(self.blocks))]  # a number for each block
        places = {}
        for b, word in enumerate(words):
            # blocks with a smaller number come before; short documents have fewer blocks
            before = [
                ((other < word) | ((other == word) & (j < b))) & (j * chunk < length) for j, other in enumerate(words)
            ]
            places[f"block_{b}"] = torch.stack(before).sum(0)
        return {"chunk": chunk, "length": length, **places}

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        chunk = parameters["chunk"]
        block = torch.div(t, chunk, rounding_mode="floor")
        moved = block  # pi(block)
        for b in range(self.blocks):
            moved = torch.where(block == b, parameters[f"block_{b}"].to(block.dtype), moved)
        return torch.where((t >= 0) & (t < parameters["length"]), t + (moved - block) * chunk, t)
