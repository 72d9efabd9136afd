"""Chunks of a document with random gaps between them, in positions and, if it is longer than the window, in content."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey, between
from .base import VIEWS, Parameters
from .options import require_int
from .targeted import Targeted

_OFFSETS, _CONTENT = 64, 128  # first slots of the draws of each kind


@VIEWS.register("pose")
@dataclass(frozen=True)
class PoSE(Targeted):
    """r(t) = t + u_i for the tokens of chunk i of a document of n tokens, u_0 = 0, u_i ~ U{u_(i-1) .. L - n}.

    With two chunks the first has c ~ U{1 .. floor((n + 1) / 2)} tokens; with more, their borders are drawn from
    1 .. n - 1. Everything is drawn anew for each document in each step, so in each epoch too.

    Documents of more than `window` tokens are first cut to it by `cut`, which trainers call: chunk i then holds tokens
    t + v_i, v_0 = 0, v_i ~ U{v_(i-1) .. length - window}. It goes with a rescaling of factor L / window.

    Args:
        target: L, in positions.
        window: tokens of a document that are kept; None keeps all of them.
        chunks: N, at least 2.

    When: Take it for the lowest loss at targets far longer than the rows that fit in memory; answers within the window
        are lost.

    Source: PoSE, arXiv:2309.10400; its code, where v and u are drawn once for all epochs.
    """

    target: int
    window: int | None = None
    chunks: int = 2

    cites = (papers.POSE,)

    def __post_init__(self) -> None:
        require_int(self, "target", self.target, 2)
        require_int(self, "window", self.window, 2)
        require_int(self, "chunks", self.chunks, 2, _OFFSETS)
        if self.window is not None and self.window > self.target:
            raise ValueError(f"view 'pose': window must not exceed target={self.target}, got {self.window}.")

    def check_length(self, length: int) -> None:
        super().check_length(length)
        if self.window is not None and length > self.window:
            raise ValueError(
                f"view 'pose': documents of {length} tokens must be cut to window={self.window} first, which "
                "RopeSFTTrainer does where the view stands alone; elsewhere take `cut`, or leave out window."
            )

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        borders, offsets = self._drawn(length, self.target - length, key, _OFFSETS)
        parameters = {f"_border_{i}": border for i, border in enumerate(borders, 1)}
        return parameters | {f"skip_{i}": offset for i, offset in enumerate(offsets, 1)}

    def _drawn(
        self, length: torch.Tensor, farthest: torch.Tensor, key: DrawKey, slot: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of the chunks 1, 2, ... of documents of `length` tokens the first token, and by how much each is moved.

        By `farthest` at most, drawn from the slots behind `slot`.
        """
        n = self.chunks - 1
        words = key.words(range(n), range(slot + 1, slot + 1 + n))
        last = (length + 1) // 2 if n == 1 else length - 1
        borders = torch.stack([between(word, 1, last.clamp(min=1)) for word in words[:n]])
        offsets, offset = [], torch.zeros_like(length)
        for word in words[n:]:
            offset = between(word, offset, farthest)
            offsets.append(offset)
        return list(borders.sort(0).values), offsets

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        moved = t
        for i in range(1, self.chunks):
            moved = torch.where(t >= parameters[f"_border_{i}"], t + parameters[f"skip_{i}"], moved)
        return moved

    @property
    def cuts(self) -> str | None:
        return None if self.window is None else f"window={self.window}"

    def kept(self, length: torch.Tensor) -> torch.Tensor:
        return length if self.window is None else length.clamp(max=self.window)

    def cut(self, length: torch.Tensor, key: DrawKey) -> torch.Tensor | None:
        if self.window is None or int(length.max()) <= self.window:
            return None
        kept = self.kept(length)
        t = torch.arange(self.window, device=length.device).expand(len(length), -1)
        content = t
        for border, offset in zip(*self._drawn(kept, length - kept, key, _CONTENT), strict=True):
            content = torch.where(t >= border, t + offset, content)
        return content
