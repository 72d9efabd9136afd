"""Labels and documents of a batch, for losses of tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from rope_kernels.vocabulary.checks import IGNORE_INDEX

from .documents import Documents, locate_documents
from .shards import SequenceShard

Rows = Literal["paper", "query_in_suffix"]


def real_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Which tokens are not padding, bool [batch, n]."""
    return torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()


def document_of_tokens(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """Ordinal of each token's document, int64 [batch, n], -1 on padding; 0 without position IDs."""
    batch, seq_len = input_ids.shape
    document = torch.zeros_like(input_ids)
    if position_ids is not None:
        documents = locate_documents(batch, seq_len, input_ids.device, position_ids, attention_mask)
        document = documents.ordinal.expand(batch, seq_len)
    return document.masked_fill(~real_tokens(input_ids, attention_mask), -1)


@dataclass(frozen=True)
class Labelled:
    """Labels and documents of a batch: all that does not depend on draws.

    Args:
        documents: of each token.
        ids: of the tokens, [batch, n].
        ordinal: of each token's document, [batch, n].
        t: index of each token in its document, [batch, n].
        valid: which tokens are real, bool [batch, n].
        labels: of each token, -100 for none, [batch, n].
        next_label: label that each query predicts, -100 for none, [batch, n].
        counted: bool [batch, n], tokens with a label; the first one of a document counts if the second has a label.
        ends: bool [batch, n], last query of a document.
        shard: the tokens of this rank where ranks share a sequence; None if it has all.
    """

    documents: Documents
    ids: torch.Tensor
    ordinal: torch.Tensor
    t: torch.Tensor
    valid: torch.Tensor
    labels: torch.Tensor
    next_label: torch.Tensor
    counted: torch.Tensor
    ends: torch.Tensor
    shard: SequenceShard | None = None

    @classmethod
    def of(cls, batch: dict[str, Any], shard: SequenceShard | None = None) -> "Labelled":
        """Read a collator's batch of whole rows: input_ids, labels, and attention_mask and position_ids if present."""
        ids, position_ids, attention_mask = batch["input_ids"], batch.get("position_ids"), batch.get("attention_mask")
        rows, seq_len = ids.shape
        documents = locate_documents(rows, seq_len, ids.device, position_ids, attention_mask)
        positions = torch.arange(seq_len, device=ids.device) if position_ids is None else position_ids
        t = (positions - documents.start).expand(rows, seq_len)  # any number on padding
        ordinal = documents.ordinal.expand(rows, seq_len)
        valid = real_tokens(ids, attention_mask)
        labels = batch.get("labels", ids).masked_fill(~valid, IGNORE_INDEX)
        follows = torch.zeros_like(valid)  # whether the next token is of the same document
        follows[:, :-1] = valid[:, :-1] & valid[:, 1:] & (ordinal[:, :-1] == ordinal[:, 1:])
        next_label = torch.full_like(labels, IGNORE_INDEX)
        next_label[:, :-1] = torch.where(follows[:, :-1], labels[:, 1:], IGNORE_INDEX)
        counted = (labels != IGNORE_INDEX) | (valid & (t == 0) & (next_label != IGNORE_INDEX))
        return cls(documents, ids, ordinal, t, valid, labels, next_label, counted, valid & ~follows, shard)

    def held(self, queries: torch.Tensor) -> torch.Tensor:
        """The queries of this rank, as indices among the flattened tokens of whole rows."""
        return queries if self.shard is None else queries[self.shard.held(queries)]

    def states(self, hidden: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Hidden states of tokens of this rank, [N, H].

        Args:
            hidden: of the rank's tokens, [batch, n or fewer, H].
            queries: indices among the flattened tokens of whole rows, [N].
        """
        return hidden.flatten(0, 1)[queries] if self.shard is None else self.shard.states(hidden, queries)

    @property
    def n_labels(self) -> int:
        """Number of queries with a label."""
        return int((self.next_label != IGNORE_INDEX).sum())

    @property
    def next_token(self) -> torch.Tensor:
        """The token after each query in its document, with or without a label, -100 for none, [batch, n]."""
        # the first token of a row, which roll moves to its end, is masked: a row's last query is an end or padding
        return self.ids.roll(-1, 1).masked_fill(~self.valid | self.ends, IGNORE_INDEX)

    @property
    def n_next(self) -> int:
        """Number of queries with a token after them."""
        return int((self.valid & ~self.ends).sum())

    @property
    def n_documents(self) -> int:
        """Number of documents with a label."""
        return int(self.per_document(self.next_label != IGNORE_INDEX).gt(0).sum())

    @property
    def drawn_at(self) -> torch.Tensor:
        """The t of views: index of each token in its document, -1 on padding, [batch, n]."""
        return self.t.masked_fill(~self.valid, -1)

    def suffix(self, affected_from: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries that the KL sums over, bool, and L - s of each token's document, both [batch, n].

        Args:
            affected_from: s of each document, in the shape of its documents.
            rows: as in `ViewConsistency`.
        """
        behind = self.t >= affected_from  # [batch, n]
        chosen = behind & (self.next_label != IGNORE_INDEX)
        if rows == "query_in_suffix":
            chosen = chosen | (behind & self.ends & self.counted)  # the last query, which predicts nothing
        return chosen, self.per_document(behind & self.counted)[self.ordinal]

    def suffix_total(self, affected_from: torch.Tensor | int, of: torch.Tensor | None = None) -> int:
        """Sum of L - s over documents, or over those where `of` is True, bool [documents]."""
        behind = (self.t >= affected_from) & self.counted
        return int((behind if of is None else behind & of[self.ordinal]).sum())

    def last_queries(self, rows: Rows) -> torch.Tensor:
        """Index t of the last query of each document in the KL, int64 [documents], -1 for none; `rows` as above."""
        chosen = self.next_label != IGNORE_INDEX
        if rows == "query_in_suffix":
            has_label = self.per_document(chosen) > 0
            chosen = chosen | (self.ends & self.counted & has_label[self.ordinal])
        return self._largest(torch.where(chosen, self.t, -1))

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each document, int64 [documents]."""
        return self._largest(self.documents.length.expand_as(self.t))

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        largest = torch.full((int(self.ordinal.max()) + 1,), -1, dtype=torch.int64, device=values.device)
        return largest.scatter_reduce_(0, self.ordinal.flatten(), values.flatten(), "amax")

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(row, first token, tokens) of each document."""
        rows, tokens = (self.valid & (self.t == 0)).nonzero(as_tuple=True)
        length = self.per_document(self.valid)[self.ordinal[rows, tokens]]
        return list(zip(rows.tolist(), tokens.tolist(), length.tolist(), strict=True))

    def per_document(self, what: torch.Tensor) -> torch.Tensor:
        """Number of tokens of each document where `what` is True, int64 [documents], given bool [batch, n]."""
        total = torch.zeros(int(self.ordinal.max()) + 1, dtype=torch.int64, device=what.device)
        return total.scatter_add_(0, self.ordinal.flatten(), what.flatten().long())
