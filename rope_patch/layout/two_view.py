"""Two views in one forward: all tokens, and a copy of those from the first one that the view moves."""

from dataclasses import dataclass

import torch

from .labelled import Labelled


@dataclass(frozen=True)
class Segment:
    """A document [begin, end) of a row, the first token with a copy, and the place of that copy."""

    row: int
    begin: int
    split: int
    end: int
    copy: int


@dataclass(frozen=True)
class TwoViewLayout:
    """A batch [batch, n] followed by copies of suffixes, [batch, n + m].

    Copies attend causally to the prefix of their document and to each other; nothing else attends to them. A prefix has
    the same hidden states under both views, so one forward gives both, with the gradients of two passes.

    Args:
        segments: one a document.
        source: token of the row that each copy repeats, 0 if there is no copy, [batch, m].
        is_copy: bool [batch, m].
        seen: place, in n + m, of each token's state under the view, [batch, n].
        document: of tokens and copies, -1 on padding and unused places, [batch, n + m].
        t: index in the document, of tokens and copies, [batch, n + m].
        in_prefix: bool [batch, n + m], tokens without a copy.
    """

    segments: tuple[Segment, ...]
    source: torch.Tensor
    is_copy: torch.Tensor
    seen: torch.Tensor
    document: torch.Tensor
    t: torch.Tensor
    in_prefix: torch.Tensor

    @classmethod
    def of(cls, labelled: Labelled, first: torch.Tensor, granule: int = 1) -> "TwoViewLayout":
        """Lay out a batch.

        Args:
            labelled: the batch.
            first: first t that the view moves, in the shape of documents, [batch, 1] or [batch, n].
            granule: copies begin at its last multiple up to `first`. The extra copies have the states of their tokens,
                so results stay the same.
        """
        batch, n = labelled.t.shape
        moved = labelled.valid & (labelled.t >= first // granule * granule)  # [batch, n]
        n_copies = moved.long().cumsum(1)  # [batch, n], those of the row up to a token
        m = max(int(n_copies[:, -1].max()), 1)  # places for copies in each row, one also if nothing moves
        source = torch.zeros(batch, m, dtype=torch.int64, device=moved.device)
        is_copy = torch.zeros(batch, m, dtype=torch.bool, device=moved.device)
        rows, tokens = moved.nonzero(as_tuple=True)  # [all copies] each, and so is places
        places = n_copies[rows, tokens] - 1
        source[rows, places] = tokens
        is_copy[rows, places] = True
        seen = torch.where(moved, n + n_copies - 1, torch.arange(n, device=moved.device))
        segments, copy = [], dict.fromkeys(range(batch), n)  # row -> place of its next copy
        # [documents, 2]: row and first token
        firsts = torch.tensor([span[:2] for span in labelled.spans], dtype=torch.int64, device=moved.device).view(-1, 2)
        in_document = labelled.per_document(moved)[labelled.ordinal[firsts[:, 0], firsts[:, 1]]]  # copies of each
        for (row, begin, length), k in zip(labelled.spans, in_document.tolist(), strict=True):
            segments.append(Segment(row, begin, begin + length - k, begin + length, copy[row]))
            copy[row] += k
        document = labelled.ordinal.expand(batch, n).masked_fill(~labelled.valid, -1)
        t = labelled.t.expand(batch, n)
        return cls(
            tuple(segments),
            source,
            is_copy,
            seen,
            torch.cat([document, document.gather(1, source).masked_fill(~is_copy, -1)], 1),
            torch.cat([t, t.gather(1, source)], 1),
            torch.cat([~moved, torch.zeros_like(is_copy)], 1),
        )

    def with_copies(self, values: torch.Tensor) -> torch.Tensor:
        """Values of tokens and copies, [batch, n + m, ...], from those of tokens, such as IDs or embeddings."""
        row = torch.arange(len(values), device=values.device)[:, None]
        absent = ~self.is_copy.view(*self.is_copy.shape, *[1] * (values.ndim - 2))
        return torch.cat([values, values[row, self.source].masked_fill(absent, 0)], 1)

    def index(self, positions: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """RoPE indices of tokens and copies, [batch, n + m], from true positions and those of the view, [batch, n]."""
        copies = moved.gather(1, self.source).masked_fill(~self.is_copy, 0)
        return torch.cat([positions.to(moved.dtype), copies], 1)

    def visible(self, row: torch.Tensor, q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
        """Whether place q of a row, token or copy, attends to place k; broadcasts.

        Args:
            row: of the batch.
            q: among n + m.
            k: among n + m.
            window: most tokens back that a query sees, itself counted, None for all.
        """
        n = self.seen.shape[1]
        same = (self.document[row, q] == self.document[row, k]) & (self.document[row, q] >= 0)
        distance = self.t[row, q] - self.t[row, k]
        # & and | alone: inductor, which compiles this for flex attention, fails on bools that are compared
        seen = same & (distance >= 0) & (((q < n) & (k < n)) | ((q >= n) & ((k >= n) | self.in_prefix[row, k])))
        if window is not None:
            seen = seen & (distance < window)
        # a place without document sees itself: a softmax over nothing is nan
        return seen | (q == k)
