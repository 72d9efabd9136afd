"""One sequence over several ranks: the tokens of each rank, and their exchange."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """The tokens of one rank, of rows that the ranks of a group share.

    Every rank has the token IDs, labels and positions of whole rows, which are small, and computes draws, documents and
    the tokens of a loss from them, so that all ranks agree. It has hidden states of its tokens only.

    Args:
        batch: of whole rows: "input_ids" [batch, n], and "labels", "attention_mask" and "position_ids" of that shape
            if the collator makes them.
        index: place in the row of each token of this rank, in its order, int64 [m] with m = n / ranks.
        group: the ranks that share the rows.
    """

    batch: dict[str, Any]
    index: torch.Tensor
    group: Any

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return distributed.get_world_size(self.group)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of a whole row."""
        return int(self.batch["input_ids"].shape[1])

    @cached_property
    def positions(self) -> torch.Tensor:
        """True positions of whole rows, [1 or batch, n]."""
        positions: torch.Tensor | None = self.batch.get("position_ids")
        return torch.arange(self.n_tokens, device=self.index.device)[None] if positions is None else positions

    @cached_property
    def _place(self) -> torch.Tensor:
        """Place of each token of a row among this rank's tokens, -1 for tokens of other ranks, int64 [n]."""
        place = torch.full((self.n_tokens,), -1, dtype=torch.int64, device=self.index.device)
        place[self.index] = torch.arange(len(self.index), device=self.index.device)
        return place

    @cached_property
    def _order(self) -> torch.Tensor:
        """Place of each token of a row in the concatenated tokens of all ranks, int64 [n]."""
        parts = [torch.empty_like(self.index) for _ in range(self.size)]
        distributed.all_gather(parts, self.index.contiguous(), group=self.group)
        return torch.cat(parts).argsort()

    def local(self, per_token: torch.Tensor) -> torch.Tensor:
        """Values of this rank's tokens, [..., m], from those of whole rows, [..., n]."""
        return per_token.index_select(-1, self.index)

    def held(self, queries: torch.Tensor) -> torch.Tensor:
        """Which tokens are this rank's, bool [N], given indices among the flattened tokens of whole rows, [N]."""
        return self._place[queries % self.n_tokens] >= 0

    def states(self, hidden: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Hidden states of tokens of this rank, [N, H], from `hidden` [batch, m, H] and `queries` as in `held`."""
        return hidden[queries // self.n_tokens, self._place[queries % self.n_tokens]]

    def by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange a part of the rows of all heads for whole rows of some heads, with gradients.

        As in Ulysses, rank r of R gets heads r h, ..., r h + h - 1 with h = ceil(n_heads / R), filled up with zeros.

        Args:
            x: [batch, n_heads, m, head_dim], of the rank's tokens.

        Returns:
            [batch, h, n, head_dim], tokens in the order of the row.
        """
        batch, n_heads, m, head_dim = x.shape
        h = -(-n_heads // self.size)
        x = pad(x, (0, 0, 0, 0, 0, h * self.size - n_heads))  # heads of zeros
        sent = x.unflatten(1, (self.size, h)).transpose(0, 1).contiguous()  # [R, batch, h, m, head_dim]
        received: torch.Tensor = _AllToAll.apply(sent, self.group)  # the same shape, by the rank of the tokens
        rows = received.permute(1, 2, 0, 3, 4).reshape(batch, h, self.size * m, head_dim)
        return rows.index_select(2, self._order)  # from the order of the ranks to that of the row

    def without_padding_mask(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a decoder with a mask of ones.

        Engines that share a sequence attend causally over whole rows and take no mask. With the mask of ones
        Transformers makes none; otherwise it would take the borders between a rank's pieces of a row for documents.
        """
        tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if tokens is None:
            return kwargs
        return {**kwargs, "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)}


class _AllToAll(torch.autograd.Function):
    """Send part i to rank i; the backward sends its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # noqa: D102
        ctx.group = group
        received = torch.empty_like(x)
        distributed.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: D102
        returned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(returned, gradient.contiguous(), group=ctx.group)
        return returned, None
