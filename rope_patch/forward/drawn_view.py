"""The RoPE indices of one forward: what a decoder was called with, and the indices that a view or a table gives it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..layout.documents import Documents
from ..views.base import Parameters, View


@dataclass
class Batch:
    """The arguments of a call of the decoder that matter for positions."""

    rows: int
    seq_len: int
    device: torch.device
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    cached: int  # tokens that the KV cache already holds
    training: bool
    ids: torch.Tensor | None = None  # [rows, seq_len]; None where the call has embeddings
    cache: Any = None
    compresses: bool = False  # rotary modules may get positions of compressed keys, not of tokens
    logs: "Sequence[Log]" = ()


class Log(Protocol):
    """What a forward reports its draws to."""

    def add(self, drawn: "DrawnView", step: torch.Tensor | int, document: torch.Tensor) -> None:
        """Take the draws of a forward, its step, and the number of each document within it."""
        ...


class ForwardIndex(Protocol):
    """The RoPE indices of one forward."""

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor:
        """RoPE indices in the shape that `position_ids` broadcasts to."""
        ...

    def counted(self, position_ids: torch.Tensor) -> torch.Tensor:
        """The same, counted from the first token of the document where that is known."""
        ...


@dataclass(eq=False)  # not frozen: Dynamo before torch 2.13 loses the fields of frozen ones made while tracing
class DrawnView:
    """A view with its draws: a function of the true positions, elementwise."""

    view: View
    documents: Documents
    parameters: Parameters
    continues: bool = False  # the draws come from a cache
    t: torch.Tensor | None = None  # as the view got it, [1 or batch, seq_len]; None for other rows or layers

    def rows(self, order: torch.Tensor) -> "DrawnView":
        """The draws of other rows: row i gets those of row order[i]."""
        n_rows = len(self.documents.start)
        taken = {
            name: p.index_select(p.ndim - 2, order.to(p.device)) if p.ndim >= 2 and p.shape[-2] == n_rows else p
            for name, p in self.parameters.items()
        }
        return DrawnView(self.view, self.documents.rows(order), taken)

    def logged(self) -> list[str]:
        """Names of the parameters that logs show: not lengths, and not those whose name begins with _."""
        own = {name: name.rpartition(".")[2] for name in self.parameters}
        return [name for name, last in own.items() if last != "length" and last[0] != "_"]

    def total(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over documents of a drawn parameter, in float64, and the number of documents.

        Where a view reads tokens it may draw for each of them: a document then counts with the mean over its tokens.
        """
        ordinal, drawn = self.documents.ordinal, self.parameters[name].double()
        if not self.view.reads_tokens:  # all tokens of a document hold its value: the first one is counted
            begins = torch.ones_like(ordinal, dtype=torch.bool)
            begins[:, 1:] = ordinal[:, 1:] != ordinal[:, :-1]
            values = drawn.expand(*drawn.shape[:-2], *ordinal.shape)
            # drawn[..., begins] would make the CPU wait for the GPU, to learn its shape
            return torch.where(begins, values, 0.0).sum(), begins.expand(values.shape).sum()
        assert self.t is not None
        shape = (len(ordinal), self.t.shape[1])
        real, of_token = (self.t >= 0).expand(shape).flatten(), ordinal.expand(shape).flatten()
        sums = drawn.new_zeros(2, ordinal.numel())  # of values, and of tokens
        sums.scatter_add_(1, of_token.expand(2, -1), torch.stack([drawn.expand(shape).flatten() * real, real.double()]))
        return (sums[0] / sums[1].clamp(min=1)).sum(), (sums[1] > 0).sum()

    def affected_from(self, t: torch.Tensor, n_layers: int) -> torch.Tensor:
        """First token of each document that any of `n_layers` layers sees at a changed distance.

        Args:
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding; whole documents.
            n_layers: of the model.
        """
        firsts = [
            group.view.affected_from(t, group.documents, group.parameters) for _, group in self.by_layer(n_layers)
        ]
        return torch.stack(firsts).amin(0)

    def by_layer(self, n_layers: int) -> "list[tuple[list[int], DrawnView]]":
        """Groups of layers that share positions."""
        groups = self.view.layer_groups(n_layers, self.parameters)
        return [(layers, DrawnView(view, self.documents, parameters)) for layers, view, parameters in groups if layers]

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Start + r(position - start) for each document; padding gets any index, since nothing attends to it."""
        start = self.documents.start
        if start.shape[-1] not in (1, position_ids.shape[-1]):
            return self._by_row()(position_ids)
        return start + self.counted(position_ids)

    def counted(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.view.rope_index(position_ids - self.documents.start, self.parameters)

    def _by_row(self) -> "DrawnView":
        """The draws once a row instead of once a token, for positions that are not those of tokens."""
        drawn = {name: p for name, p in self.parameters.items() if p.ndim >= 2}
        if not all(bool((x == x[..., -1:]).all()) for x in (self.documents.ordinal, *drawn.values())):
            raise ValueError(
                "this model applies RoPE to windows of tokens, which may cross documents, so a RoPE view needs one "
                "document a row and one draw for it. Do not pack documents (position_ids that restart at 0)."
            )
        rows = {name: p[..., -1:] for name, p in drawn.items()}
        return DrawnView(self.view, self.documents.last_column(), {**self.parameters, **rows}, self.continues)


@dataclass(eq=False)
class IndexTable:
    """Explicit indices of the tokens of this forward, [batch, seq_len]; `table` also has those of earlier tokens.

    Compressed keys, as in DeepSeek-V4, stand for windows of tokens. Their position is that of the window's first token,
    which may be in an earlier forward, and they get its index. In a forward of one token, both kinds of positions have
    one shape and are told apart by their values: `positions` are those of the tokens.
    """

    index: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor | None = None  # [1 or batch, seq_len]; None if keys are not compressed
    continues: bool = False  # a cache holds earlier tokens

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor:
        n_asked, n_tokens = position_ids.shape[-1], self.index.shape[-1]
        if self.positions is None and n_asked != n_tokens:
            raise ValueError(
                f"index holds {n_tokens} RoPE indices a row, but a rotary module of this model asked for {n_asked}. "
                "Use a view, which is a function of positions, instead."
            )
        if self.positions is None or (
            n_asked == n_tokens and bool((position_ids == self.positions.to(position_ids)).all())
        ):
            return self.index
        return self.table.gather(1, position_ids.to(self.table.device).expand(self.table.shape[0], -1))

    def counted(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self(position_ids)
