"""One of several views for each document."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.draws import DrawKey
from ..base.validators import require_number
from ..layout.documents import Documents
from .base import VIEWS, Parameters, View
from .several import Several, parameters_of


@VIEWS.register("mix")
@dataclass(frozen=True)
class Mix(Several):
    """r(t) = v_k(t), with k drawn for each document, P(k = i) = shares[i].

    Example: `Mix([Standard(), PoSE(target=65536, chunks=4)])` keeps half of the documents at true positions and skips
    positions in the other half. One run then trains for a longer context window and preserves short text.

    The choice of the view is independent of what the views draw.

    Args:
        views: at least two different views; "standard" leaves documents as they are. In a recipe, a name, or
            `{view: pose, target: 65536}` for `PoSE(target=65536)`.
        shares: probability of each view, above 0, with sum 1; None gives all the same.

    When: Take it to keep a share of the documents at true positions, so that less is lost within the window.

    Source: ours. LongReD (arXiv:2502.07365) and LongRoPE2 (arXiv:2502.20082) train on both kinds of rows in one run, as
        rows of two data sets.
    """

    views: Sequence[View]
    shares: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._take_views(least=2)
        for i, view in enumerate(self.views):
            if view in self.views[:i]:
                raise ValueError(f"view 'mix': {view!r} is given twice: give it once, with the sum of both shares.")
        n = len(self.views)
        shares: object = (1 / n,) * n if self.shares is None else self.shares
        if isinstance(shares, str) or not isinstance(shares, Sequence) or len(shares) != n:
            raise ValueError(f"view 'mix': shares must be a list of {n} numbers, one a view, or None, got {shares!r}.")
        for share in shares:
            require_number("view 'mix': each of shares", share, below=1)
        if not math.isclose(sum(shares), 1, rel_tol=0, abs_tol=1e-6):
            raise ValueError(f"view 'mix': shares must add up to 1, got {tuple(shares)} with sum {sum(shares):g}.")
        object.__setattr__(self, "shares", tuple(shares))

    @property
    def stands_alone(self) -> bool:
        return True

    def alternatives(self) -> Sequence[View]:
        return self.views

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        assert self.shares is not None
        pairs = zip(self.shares, self.views, strict=True)
        return sum((share * view.affected_share(t, length) for share, view in pairs), torch.zeros((), device=t.device))

    def reach(self, length: int, last: int | None = None) -> int | None:
        farthest = [view.reach(length, last) for view in self.views]
        known = [index for index in farthest if index is not None]
        return max(known) if len(known) == len(farthest) else None

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        return self._taken(key) | super().draw(length, key)

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        return self._taken(key) | super().draw_for(ids, t, documents, key)

    def _taken(self, key: DrawKey) -> Parameters:
        """Whether each document takes view i, as `taken_i`, whose mean in a log is the share that did."""
        assert self.shares is not None
        u, n = key.uniform(slot=0), len(self.shares)
        which = torch.zeros_like(u, dtype=torch.int64)
        for i in range(1, n):  # the last one takes what rounding leaves below 1
            which = which + (u >= math.fsum(self.shares[:i]))
        return {f"taken_{i}": which == i for i in range(n)}

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        index = self.views[0].rope_index(t, parameters_of(parameters, 0))
        for i, view in enumerate(self.views[1:], 1):
            index = torch.where(parameters[f"taken_{i}"], view.rope_index(t, parameters_of(parameters, i)), index)
        return index
