"""Chunks of a document with random gaps between them, in positions and, if it is longer than the window, in content."""

from dataclasses import dataclass

import torch

from ..base import papers
from ..base.draws import DrawKey, between
from ..base.validators import require_integer
from .base import VIEWS, Parameters
from .targeted import Targeted

_OFFSETS, _CONTENT = 64, 128  # first slots of the draws of positions and of content


@VIEWS.register("pose")
@dataclass(frozen=True)
class PoSE(Targeted):
    """r(t) = t + u_i for the tokens of chunk i of a document of n tokens, u_0 = 0, u_i ~ U{u_(i-1) .. L - n}.

    With two chunks, the first one has c ~ U{1 .. floor((n + 1) / 2)} tokens; with more, borders are drawn from
    1 .. n - 1. Everything is drawn anew for each document in each step.

    Trainers first shorten documents of more than `window` tokens (`cut`): chunk i then has the tokens t + v_i, v_0 = 0,
    v_i ~ U{v_(i-1) .. length - window}. The paper uses a RoPE scaling of factor L / window.

    Args:
        target: L, in positions.
        window: number of tokens of a document to keep; None keeps all.
        chunks: number of chunks, at least 2.

    When: Take it for the lowest loss at targets far longer than the rows that fit in memory; answers within the window
        get worse.

    Source: PoSE, arXiv:2309.10400; its code draws v and u once for all epochs.
    """

    target: int
    window: int | None = None
    chunks: int = 2

    cites = (papers.POSE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("view 'pose': chunks", self.chunks, least=2, most=_OFFSETS)
        if self.window is not None:
            require_integer("view 'pose': window", self.window, least=2)
            if self.window > self.target:
                raise ValueError(f"view 'pose': window must not exceed target={self.target}, got {self.window}.")

    def check_length(self, length: int) -> None:
        super().check_length(length)
        if self.window is not None and length > self.window:
            raise ValueError(
                f"view 'pose': documents of {length} tokens must first be shortened to window={self.window}. "
                "RopeSFTTrainer does so unless the view is part of another view; elsewhere call `cut`, or leave out "
                "window."
            )

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        borders, offsets = self._drawn(length, self.target - length, key, _OFFSETS)
        parameters = {f"_border_{i}": border for i, border in enumerate(borders, 1)}
        return parameters | {f"skip_{i}": offset for i, offset in enumerate(offsets, 1)}

    def _drawn(
        self, length: torch.Tensor, farthest: torch.Tensor, key: DrawKey, slot: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """First token and offset, `farthest` at most, of chunks 1, 2, ..., from the random numbers after `slot`."""
        n = self.chunks - 1
        words = key.words(range(n), range(slot + 1, slot + 1 + n))
        last = (length + 1) // 2 if n == 1 else length - 1  # the largest border
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
