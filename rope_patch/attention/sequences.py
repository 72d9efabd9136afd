"""Parts of rows as sequences of one FlashAttention call, which takes no masks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..families.attention_calls import AttentionCall


@dataclass(frozen=True)
class Sequences:
    """Queries of each sequence attend to its keys, causally; its last query and its last key are the same token.

    Args:
        queries: places in the flattened batch [batch * n], sequence after sequence.
        keys: places there; a sequence may have more keys than queries, and a key may be in several sequences.
        query_ends: int32, 0 and then where each sequence ends among `queries`.
        key_ends: int32, 0 and then where each sequence ends among `keys`.
        longest_query: most queries of a sequence.
        longest_key: most keys of a sequence.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, queries: Sequence[range], keys: Sequence[Sequence[range]], device: torch.device) -> "Sequences":
        """Lay out sequences.

        Args:
            queries: places of each sequence's queries.
            keys: ranges of places that together are each sequence's keys, in order.
            device: of the result.
        """
        n_queries = [len(q) for q in queries]
        n_keys = [sum(map(len, parts)) for parts in keys]
        return cls(
            _places(queries, device),
            _places((part for parts in keys for part in parts), device),
            _ends(n_queries, device),
            _ends(n_keys, device),
            max(n_queries),
            max(n_keys),
        )

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Output [batch, n, heads, value_dim], 0 where no sequence has a query. The call has the sliding window.

        Args:
            call: of the layer.
            query: all or some heads of its queries, [batch, heads, n, head_dim].
            key: the keys for them, [batch, kv_heads, n, head_dim].
            value: [batch, kv_heads, n, value_dim].
        """
        batch, _, n, _ = query.shape
        output = call.with_inputs(
            _gathered(query, self.queries),
            _gathered(key, self.keys),
            _gathered(value, self.keys),
            None,  # no mask: the ends below say which keys a query has
            position_ids=None,  # those of the call are of its whole rows
            cu_seq_lens_q=self.query_ends,
            cu_seq_lens_k=self.key_ends,
            max_length_q=self.longest_query,
            max_length_k=self.longest_key,
        )[0]  # of the one row, [queries, heads, value_dim]
        return put_back(output, self.queries, batch, n)


def with_gaps(sizes: Mapping[int, int], total: int) -> dict[int, int]:
    """`sizes` of pieces by their place among `total` tokens, in order, with the gaps between them as more pieces."""
    whole: dict[int, int] = {}
    end = 0
    for place, size in [*sorted(sizes.items()), (total, 0)]:  # the last one closes the last gap
        if place > end:
            whole[end] = place - end
        if size:
            whole[place] = size
        end = place + size
    return whole


def by_token(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, n, d] as [batch * n, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def put_back(output: torch.Tensor, places: torch.Tensor, batch: int, n: int) -> torch.Tensor:
    """Output of tokens [tokens, heads, d] at their places in a batch [batch, n, heads, d], 0 elsewhere."""
    whole = output.new_zeros(batch * n, *output.shape[1:])
    return whole.index_copy(0, places, output).view(batch, n, *output.shape[1:])


def _gathered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Tokens of [batch, heads, n, d] at `places`, as one row [1, heads, places, d]."""
    return by_token(x)[places].transpose(0, 1)[None]


def _places(parts: Iterable[range], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])


def _ends(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
