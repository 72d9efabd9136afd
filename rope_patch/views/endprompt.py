"""A cue at the end of a short document gets positions of the end of a long one."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ..base import papers
from ..base.draws import DrawKey
from ..base.validators import require_choice, require_integer
from ..layout.documents import Documents, checked_cues, closing_tokens
from .base import VIEWS, Cue, Parameters, require_ids
from .targeted import Targeted

Placement = Literal["end", "random", "parts"]


@VIEWS.register("endprompt")
@dataclass(frozen=True)
class EndPrompt(Targeted):
    """r(t) = t for the body, t < a, and the last b = `cue_tokens` tokens of a document of a + b have far positions.

    - "end": r(t) = L - b + (t - a), so that the last token is at L - 1.
    - "random": the cue starts at U{a .. L - b}, drawn for each document, as in the authors'
      `finetune_suffix_random.py`.
    - "parts": the first c ~ U{1 .. floor((b + 1) / 2)} tokens of the cue have r(t) = t + u_1, the others t + u_2, with
      u_1 ~ U{0 .. L - a - b} and u_2 ~ U{u_1 .. L - a - b}: PoSE's law, with a border between body and cue. This is our
      reading of ET(PoSE), which "partitions only the end prompts" (sections 4.4 and 4.5).

    The document then has the distances 0 .. a - 1 and, under "end", L - a - b + 1 .. L - 1. Tokens a .. a + b - 2 have
    a far key and a label; with one cue token there are none. The paper uses PI with factor ceil(L / native window).

    b = 0 is our control without a cue: it moves nothing and shows the effect of PI and the text alone.

    Args:
        target: L, in positions.
        cue_tokens: b, for all documents; `trl_ext.append_cue` appends the cue. Or a set of cues, as lists of token IDs:
            b is then the length of the longest cue at the document's end, 0 for none. A document of at most b tokens
            is not changed.
        placement: where the cue goes, "end", "random" or "parts".

    When: Take it to reproduce EndPrompt; in our runs its cue gave no more than the control without one.

    Source: EndPrompt, arXiv:2605.14589, Eq. 10 for the set; its code moves the last `pose_chunk2_length` tokens of
        each row.
    """

    target: int
    cue_tokens: Cue
    placement: Placement = "end"

    cue_option = "cue_tokens"

    cites = (papers.ENDPROMPT,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cue_tokens, int):
            require_integer("view 'endprompt': cue_tokens", self.cue_tokens, least=0)
        else:
            cues = checked_cues("view 'endprompt': cue_tokens", self.cue_tokens, least=0)
            object.__setattr__(self, "cue_tokens", cues)
        require_choice("view 'endprompt': placement", self.placement, get_args(Placement))

    def check_run(self, args: Any) -> None:
        if args.cue is not None and args.packing and args.packing_strategy == "wrapped":
            raise ValueError(
                "packing_strategy='wrapped' cuts documents anywhere, so that rows end without their cue: use 'bfd', or "
                "no packing."
            )

    def why_control(self) -> str | None:
        if max(self._cue_lengths()) > 1:
            return None
        return f"with cue_tokens={self.cue_tokens} no token is predicted from far"

    def conditions(self) -> list[str]:
        return [*super().conditions(), "documents must end with a cue of two tokens or more"]

    @property
    def reads_tokens(self) -> bool:
        return not isinstance(self.cue_tokens, int)

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        shortest = min((b for b in self._cue_lengths() if b), default=self.target)
        return (length > shortest) & (length < self.target)

    def _cue_lengths(self) -> list[int]:
        return [self.cue_tokens] if isinstance(self.cue_tokens, int) else [len(cue) for cue in self.cue_tokens]

    def reach(self, length: int, last: int | None = None) -> int:
        if self.cue_tokens == 0:
            return length - 1 if last is None else last
        return super().reach(length, last)

    def targets(self) -> list[tuple[str, int]]:
        return [] if self.cue_tokens == 0 else super().targets()

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        if not isinstance(self.cue_tokens, int):
            raise ValueError("view 'endprompt' with a set of cues reads tokens: use draw_for.")
        return self._parameters(length, torch.full_like(length, self.cue_tokens), key)

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        if isinstance(self.cue_tokens, int):
            return self.draw(documents.length, key)
        n_tokens = closing_tokens(require_ids(self, ids), t, documents, self.cue_tokens)
        if documents.length.shape[1] == 1:  # one value a document, as lengths have
            n_tokens = n_tokens[:, -1:]
        return self._parameters(documents.length, n_tokens, key)

    def _parameters(self, length: torch.Tensor, n_tokens: torch.Tensor, key: DrawKey) -> Parameters:
        farthest = self.target - length  # skip of a cue that ends at L - 1
        skip = farthest if self.placement == "end" else key.integers(0, farthest, slot=0)
        moves = (length > n_tokens) & (n_tokens > 0)  # not without a cue, nor without a body before it
        drawn = {"split": torch.where(moves, length - n_tokens, length), "skip": torch.where(moves, skip, 0)}
        if self.placement == "parts":
            first_part = key.integers(1, ((n_tokens + 1) // 2).clamp(min=1), slot=1)
            drawn["split_2"] = torch.where(moves, drawn["split"] + first_part, length)
            drawn["skip_2"] = torch.where(moves, key.integers(skip, farthest, slot=2), 0)
        return drawn

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        moved = torch.where(t >= parameters["split"], t + parameters["skip"], t)
        if self.placement != "parts":
            return moved
        return torch.where(t >= parameters["split_2"], t + parameters["skip_2"], moved)
