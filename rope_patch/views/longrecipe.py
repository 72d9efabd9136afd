"""Sentences of a document with random gaps between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..layout.documents import Documents
from .base import VIEWS, Parameters, TrainingText, require_ids
from .borders import sentence_ends
from .targeted import Targeted

_SENTENCES = 64  # first slot of their draws
_APART = 2**32  # more than any offset: documents do not mix when offsets are sorted


@VIEWS.register("longrecipe")
@dataclass(frozen=True)
class LongRecipe(Targeted):
    """r(t) = t for t < c, and t + u_j from there on, j the sentence of token t, in a document of n tokens.

    A sentence ends with a token of `sentence_ends`. Each of m sentences has a draw from U{0 .. L - n}. They are sorted,
    the smallest is dropped, and the others are u_1 <= u_2 <= ... <= u_(m-1), with u_0 = 0 for the first sentence.
    c ~ U{1 .. floor((n + 1) / 2)} may lie within a sentence. So the last index is at most L - 1, and from c on
    positions jump only between sentences.

    Args:
        target: L, in positions.
        sentence_ends: token IDs; if left out, `RopeSFTTrainer` finds them in its tokenizer.

    When: Take it to skip positions only between sentences; in our runs PoSE had the lower loss.

    Source: LongRecipe, arXiv:2409.00509, and its code, which draws the places of m sentences among L - n + m without
        repetition, sets the first one to 0, and keeps them for all epochs. The draws differ only in how rarely two gaps
        are equal. The paper's selection of tokens is not part of this view.
    """

    target: int
    sentence_ends: Sequence[int]

    from_text = MappingProxyType({"sentence_ends": (0,)})

    cites = (papers.LONGRECIPE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        ends: object = self.sentence_ends
        if isinstance(ends, str) or not isinstance(ends, Sequence) or not ends or any(type(i) is not int for i in ends):
            raise ValueError(f"view 'longrecipe': sentence_ends must be a list of one or more token IDs, got {ends!r}.")
        object.__setattr__(self, "sentence_ends", tuple(sorted(set(self.sentence_ends))))

    @classmethod
    def prepare_text(cls, options: dict[str, Any], text: TrainingText) -> tuple[dict[str, Any], Any]:
        if "sentence_ends" in options:
            return options, text.dataset
        return {**options, "sentence_ends": sentence_ends(text.tokenizer)}, text.dataset

    def conditions(self) -> list[str]:
        return [*super().conditions(), "documents must contain sentence_ends"]

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        raise ValueError("view 'longrecipe' reads tokens: use draw_for.")

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        ids = require_ids(self, ids)
        t, ordinal = t.expand(ids.shape), documents.ordinal.expand(ids.shape)  # [batch, seq_len]
        is_end = torch.isin(ids, torch.tensor(self.sentence_ends, device=ids.device))
        begins = torch.zeros_like(is_end)
        begins[:, 1:] = is_end[:, :-1]
        begins = (t == 0) | (begins & (t >= 1) & (t < documents.length))
        # [batch, seq_len]: one a token, read where a sentence begins
        gap = key.integers(0, self.target - documents.length, slot=_SENTENCES + t.clamp(min=0))
        # documents come in rising order, so that sorting all gaps at once sorts those of each
        floor = (ordinal * _APART).flatten()
        beginning = begins.flatten()
        in_order = torch.where(beginning, floor + gap.flatten(), torch.iinfo(torch.int64).max).sort().values
        of_token = in_order[(beginning.cumsum(0) - 1).clamp(min=0)]  # to the k-th sentence the k-th smallest
        of_token = torch.where(t.flatten() == 0, floor, of_token)  # the smallest, which is dropped
        # from its beginning to the next one a sentence keeps its gap
        offset = (torch.where(beginning, of_token, floor).cummax(0).values - floor).view(ids.shape)
        first_part = key.integers(1, ((documents.length + 1) // 2).clamp(min=1), slot=0)
        return {"offset": torch.where(t < first_part, 0, offset)}

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return t + parameters["offset"]
