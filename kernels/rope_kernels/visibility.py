"""Which keys a query sees: causality, padding and packed documents as per-token integers that kernels can read."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Visibility:
    """Key j is visible to query i iff both are of one document, and j <= i where attention is causal.

    Args:
        causal: whether later keys are hidden.
        document: [batch, n] int32, equal for tokens of one document, -1 for padding. None: one document, no padding.
        first: [batch, n] int32, a bound on the tokens that token i can meet: none before `first`. None with `document`.
        end: [batch, n] int32, nor any from `end` on. None with `document`.
    """

    causal: bool
    document: torch.Tensor | None = None
    first: torch.Tensor | None = None
    end: torch.Tensor | None = None

    @classmethod
    def of_documents(cls, document: torch.Tensor, causal: bool = True) -> "Visibility":
        """From the document of each token, integers [batch, n], -1 on padding; a document's tokens lie together."""
        document = document.int()
        batch, seq_len = document.shape
        index = torch.arange(seq_len, device=document.device, dtype=torch.int32).expand(batch, -1)
        # padding counts with the document before it, so that documents are runs
        runs = document.cummax(1).values
        begins = torch.ones_like(runs, dtype=torch.bool)
        begins[:, 1:] = runs[:, 1:] != runs[:, :-1]
        first = torch.where(begins, index, 0).cummax(1).values
        ends = torch.ones_like(begins)
        ends[:, :-1] = begins[:, 1:]
        end = torch.where(ends, index + 1, seq_len).flip(1).cummin(1).values.flip(1)
        return cls(causal, document.contiguous(), first.int().contiguous(), end.int().contiguous())

    @property
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """document, first, end."""
        return self.document, self.first, self.end

    def mask(self, rows: slice, keys: slice, device: torch.device) -> torch.Tensor:
        """Whether queries `rows` see `keys`, bool [batch or 1, 1, n_rows, n_keys]."""
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        seen = key <= query if self.causal else torch.ones(len(query), len(key), dtype=torch.bool, device=device)
        if self.document is None:
            return seen[None, None]
        own = self.document[:, None, rows, None]
        return seen & (own == self.document[:, None, None, keys]) & (own >= 0)


def make_visibility(
    batch: int,
    seq_len: int,
    device: torch.device,
    *,
    causal: bool,
    key_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Visibility:
    """Read padding and document borders.

    Args:
        batch: rows.
        seq_len: tokens in a row, n.
        device: of the tensors that are masked.
        causal: whether later keys are hidden.
        key_mask: [batch, n] bool, False on padding, which neither sees nor is seen.
        cu_seqlens: [n_documents + 1] integers, where documents begin in the batch * n tokens in row order: 0 first,
            batch * n last, rising, with every start of a row among them.

    Raises:
        ValueError: a shape, dtype, device or order is not as above.
    """
    if key_mask is None and cu_seqlens is None:
        return Visibility(causal)
    document = torch.zeros(batch, seq_len, dtype=torch.int32, device=device)
    if cu_seqlens is not None:
        _require_borders(cu_seqlens, batch, seq_len)
        tokens = torch.arange(batch * seq_len, device=device)
        document = torch.searchsorted(cu_seqlens.to(device, torch.int64), tokens, right=True).view(batch, seq_len).int()
    if key_mask is not None:
        if key_mask.shape != (batch, seq_len) or key_mask.dtype != torch.bool or key_mask.device != device:
            raise ValueError(
                f"key_mask must be [{batch}, {seq_len}] bool on {device}, got {list(key_mask.shape)} {key_mask.dtype} "
                f"on {key_mask.device}."
            )
        document = document.masked_fill(~key_mask, -1)
    return Visibility.of_documents(document, causal)


def _require_borders(cu_seqlens: torch.Tensor, batch: int, seq_len: int) -> None:
    wanted = f"cu_seqlens must be [n_documents + 1] integers rising from 0 to {batch * seq_len}"
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        raise ValueError(f"{wanted}, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}.")
    borders = cu_seqlens.tolist()
    rises = all(a < b for a, b in zip(borders, borders[1:], strict=False))
    if borders[0] != 0 or borders[-1] != batch * seq_len or not rises:
        raise ValueError(f"{wanted}, got {borders if len(borders) < 9 else f'{borders[:4]} .. {borders[-4:]}'}.")
    if not set(range(0, batch * seq_len, seq_len)) <= set(borders):
        raise ValueError(
            f"cu_seqlens must hold every start of a row, multiples of {seq_len}, as documents end with rows."
        )
