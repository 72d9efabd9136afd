"""A cue at the end of a short document is read as if at the end of a long one."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..draws import DrawKey
from .base import VIEWS, Parameters, View, require_choice, require_indexable, require_int

Placement = Literal["end", "random"]


@VIEWS.register("endprompt")
@dataclass(frozen=True)
class EndPrompt(View):
    """r(t) = t for the body, t < a, and the last b = `cue_tokens` tokens of a document of a + b have far positions.

    - "end": r(t) = L - b + (t - a), so that the last token is at L - 1.
    - "random": the cue starts anywhere from a, right behind the body, to L - b, drawn for each document: ET(PoSE).

    Distances that a document shows are 0 .. a - 1 and, under "end", L - a - b + 1 .. L - 1. Rows a .. a + b - 2 are
    those with a far key and a label: with one cue token there are none. b = 0 is the control, the body alone. It goes
    with PI of factor ceil(L / native window).

    Args:
        target: L, in positions.
        cue_tokens: b, of every document; `trl_ext.append_cue` puts them there. A document of no more tokens than that
            stays as it is.
        placement: see above.

    Source: EndPrompt; its code moves the last `pose_chunk2_length` tokens of whatever arrives.
    """

    target: int
    cue_tokens: int
    placement: Placement = "end"

    def __post_init__(self) -> None:
        require_int(self, "target", self.target, 2)
        require_int(self, "cue_tokens", self.cue_tokens, 0)
        require_choice(self, "placement", self.placement, get_args(Placement))

    def check_length(self, length: int) -> None:
        if length > self.target:
            raise ValueError(
                f"view 'endprompt': documents of {length} tokens reach beyond target={self.target}. Use shorter rows "
                "or a larger target."
            )
        require_indexable(self, self.target)

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        farthest = self.target - length
        skip = farthest if self.placement == "end" else key.integers(0, farthest, slot=0)
        has_body = length > self.cue_tokens
        moves = has_body & torch.tensor(self.cue_tokens > 0, device=length.device)
        return {"split": torch.where(moves, length - self.cue_tokens, length), "skip": torch.where(moves, skip, 0)}

    def affected_from(self, length: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return torch.where(parameters["skip"] > 0, parameters["split"], length)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return torch.where(t >= parameters["split"], t + parameters["skip"], t)
