"""The suffix of a document moves away from its prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..base.validators import require_choice
from ..layout.documents import Documents
from .base import MAX_INDEX, VIEWS, Parameters, TrainingText, View, require_ids
from .borders import BORDERS, border_tokens, checked_borders, drawn_border
from .laws import Law, Uniform, reach, require_integers, sample


@VIEWS.register("skip")
@dataclass(frozen=True)
class Skip(View):
    """r(t) = t for t < split and t + skip from there on: the suffix is far from the prefix.

    Both options are drawn anew for each document of L tokens, independently.

    Args:
        split: s, in tokens, below L, by default from U{0 .. L - 1}; 0 moves the whole document, which changes nothing.
            Or where it may fall: after a "sentence", "paragraph" or "document", whose tokens `RopeSFTTrainer` finds in
            its tokenizer, or after lists of token IDs, [[13], [198, 198]]. Each border of a document is equally
            likely; a document without one is not changed.
        skip: y, in positions, by default from U{1 .. L}. Longer ones e.g. by LogUniform(1, 65536), in a recipe
            `{law: log-uniform, high: 65536}`; a negative skip moves the suffix back over the prefix.

    When: Take it first: short rows then train distances far beyond their length.

    Source: RPSD, arXiv:2604.14339, the skip view q(s, y); other laws than the uniform one, curricula and
        borders are ours; its future work names borders.
    """

    split: int | Law | str | Sequence[Sequence[int]] = Uniform(0)
    skip: int | Law = Uniform(1)

    cites = (papers.RPSD,)

    def __post_init__(self) -> None:
        if isinstance(self.split, str):
            require_choice("view 'skip': split", self.split, BORDERS)
        elif isinstance(self.split, Sequence):
            object.__setattr__(self, "split", checked_borders("view 'skip': split", self.split))
        else:
            require_integers("view 'skip': split", self.split, least=0, most=MAX_INDEX)
        require_integers("view 'skip': skip", self.skip, least=-MAX_INDEX, most=MAX_INDEX)

    @classmethod
    def prepare_text(cls, options: dict[str, Any], text: TrainingText) -> tuple[dict[str, Any], Any]:
        if isinstance(options.get("split"), str):
            options = {**options, "split": border_tokens(text.tokenizer, options["split"])}
        return options, text.dataset

    @property
    def reads_tokens(self) -> bool:
        return isinstance(self.split, Sequence)

    def check_length(self, length: int) -> None:
        if isinstance(self.split, int) and self.split >= length:
            raise ValueError(
                f"view 'skip': split must be below the number of tokens in the sequence, got split={self.split} for "
                f"{length} tokens. Use a smaller split, or leave it out to draw one within each document."
            )
        super().check_length(length)

    def reach(self, length: int, last: int | None = None) -> int:
        return (length - 1 if last is None else last) + max(reach(self.skip, length), 0)

    def largest_skip(self, length: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(self.skip, int) else torch.zeros_like(length) + reach(self.skip, length)

    def conditions(self) -> list[str]:
        return ["a fixed split, or a border to split at, must lie within documents"]

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        if isinstance(self.split, Sequence):
            raise ValueError("view 'skip' with a split at borders reads tokens: use draw_for.")
        return self._parameters(sample(self.split, key, 0, length - 1), length, key)

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        split = self.split
        if isinstance(split, str):
            raise ValueError(
                f"view 'skip': split={split!r} needs a tokenizer, which RopeSFTTrainer has unless the view is part of "
                f"another view. Give token IDs: rope_patch.views.border_tokens(tokenizer, {split!r})."
            )
        if isinstance(split, int | Law):
            return self.draw(documents.length, key)
        at = drawn_border(require_ids(self, ids), t, documents, key, split)
        return self._parameters(at, documents.length, key)

    def _parameters(self, split: torch.Tensor, length: torch.Tensor, key: DrawKey) -> Parameters:
        return {"split": split, "skip": sample(self.skip, key, 1, length)}

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if isinstance(self.split, int):
            return (t >= self.split).double()
        if self.split == Uniform(0):
            return t / length.double()  # s is one of 1 .. t
        return super().affected_share(t, length)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        if self.split == 0 or self.skip == 0:
            return torch.zeros_like(length, dtype=torch.bool)
        if isinstance(self.split, Sequence):
            return length > min(map(len, self.split))  # a name stands for borders of one token
        return length > (self.split if isinstance(self.split, int) else 1)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return torch.where(t >= parameters["split"], t + parameters["skip"], t)
