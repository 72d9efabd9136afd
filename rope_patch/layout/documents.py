"""Documents of a batch: views are drawn for each of them and never cross a boundary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.draws import mixed

_WORD = 0xFFFFFFFF  # 32 bits


@dataclass(frozen=True)
class Documents:
    """The document of each token. Fields are int64, [batch, 1] if every row is one document, else [batch, seq_len].

    Args:
        start: position of the document's first token, as in `position_ids`.
        length: number of tokens of the document that are not padding, at least 1.
        ordinal: 0, 1, ... over the documents of the batch, row by row.
    """

    start: torch.Tensor
    length: torch.Tensor
    ordinal: torch.Tensor

    def last_column(self) -> "Documents":
        """The last document of each row, [batch, 1], which decoding with a cache continues."""
        return Documents(self.start[:, -1:], self.length[:, -1:], self.ordinal[:, -1:])

    def rows(self, order: torch.Tensor) -> "Documents":
        """The documents of rows order[0], order[1], ..."""
        return Documents(*(x[order.to(x.device)] for x in (self.start, self.length, self.ordinal)))


def locate_documents(
    batch: int,
    seq_len: int,
    device: torch.device,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> Documents:
    """Find the documents of a batch from the arguments of a Transformers decoder.

    A document begins at each token whose position is not its predecessor's plus one, as in Transformers' masks of
    packed rows (`masking_utils.find_packed_sequence_indices`). Padding gets the values of the document before it, or at
    the left of a row those of the document after it.

    Args:
        batch: number of rows.
        seq_len: tokens in a row.
        device: of the result.
        position_ids: [1 or batch, seq_len], or None for 0..seq_len-1.
        attention_mask: [batch, seq_len], nonzero where a token is real. None, or a mask with other dimensions: no
            padding.
    """
    valid = attention_mask.bool() if attention_mask is not None and attention_mask.ndim == 2 else None
    if position_ids is None:
        return _rows_as_documents(batch, seq_len, device, valid)
    positions = position_ids.expand(batch, seq_len)
    token = torch.arange(seq_len, device=device).expand(batch, seq_len)
    begins = torch.ones(batch, seq_len, dtype=torch.bool, device=device)  # the first token of a row begins one
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    if valid is not None:
        after_padding = torch.zeros_like(begins)
        after_padding[:, 0] = True
        after_padding[:, 1:] = ~valid[:, :-1]
        first_real = valid & (valid.cumsum(1) == 1)  # of each row
        # padding must not hide the start of a row, nor may a row without real tokens lack one
        begins = (valid & (begins | after_padding)) | first_real | ((token == 0) & ~valid.any(1, keepdim=True))
    number = begins.cumsum(1).clamp(min=1)  # left padding joins the first document
    first = torch.where(begins, token, seq_len).flip(1).cummin(1).values.flip(1)  # next beginning at or after a token
    first = torch.where(begins.cumsum(1) == 0, first, torch.where(begins, token, 0).cummax(1).values)
    real = torch.ones_like(begins) if valid is None else valid
    # real tokens of each document of a row, counted in column `number`, from 1 on, and handed back to its tokens
    length = (
        torch.zeros(batch, seq_len + 1, dtype=torch.int64, device=device)
        .scatter_add_(1, number, real.long())
        .gather(1, number)
        .clamp(min=1)
    )
    before = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # documents of earlier rows
    before[1:] = begins.sum(1, keepdim=True).cumsum(0)[:-1]
    return Documents(start=positions.gather(1, first), length=length, ordinal=before + number - 1)


def real_tokens_of(attention_mask: Any, cached: int = 0) -> torch.Tensor | None:
    """Which tokens are not padding, [batch, seq_len], from any mask that a decoder can get; None if unknown.

    Multimodal models pass finished masks to their text decoder, [batch, 1 or n_heads, queries, keys], or one for each
    layer type. A token is real if it attends to itself there (True, or 0 in an additive mask). The same holds for a
    static cache, which has more keys than the `cached` tokens and those of the forward. Tokens that follow cached ones
    are not examined.
    """
    if isinstance(attention_mask, dict):
        masks = [real_tokens_of(mask, cached) for mask in attention_mask.values()]
        return next((mask for mask in masks if mask is not None), None)
    if isinstance(attention_mask, torch.Tensor):
        n_queries, n_keys = attention_mask.shape[-2:]
        if attention_mask.ndim != 4 or n_queries > n_keys or (n_queries < n_keys and cached):
            return attention_mask
        itself = attention_mask[:, 0].diagonal(dim1=1, dim2=2)  # [batch, seq_len]: query i and key i of one head
        return itself if itself.dtype == torch.bool else itself == 0
    if hasattr(attention_mask, "mask_mod"):  # FlexAttention's
        n_rows, _, n_queries, n_keys = attention_mask.shape
        if n_queries != n_keys:
            return None
        token = torch.arange(n_keys, device=attention_mask.kv_num_blocks.device)
        row = torch.arange(n_rows, device=token.device)[:, None]
        return attention_mask.mask_mod(row, torch.zeros_like(row), token, token).expand(n_rows, n_keys)
    return None


def _rows_as_documents(batch: int, seq_len: int, device: torch.device, valid: torch.Tensor | None) -> Documents:
    ordinal = torch.arange(batch, device=device)[:, None]
    if valid is None:
        start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return Documents(start, torch.full_like(start, seq_len), ordinal)
    start = valid.long().argmax(1, keepdim=True)  # positions are token indices here
    return Documents(start, valid.sum(1, keepdim=True).clamp(min=1), ordinal)


def closing_tokens(
    ids: torch.Tensor, t: torch.Tensor, documents: Documents, patterns: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Length of the longest pattern at the end of each token's document, int64 [batch, seq_len], 0 for none.

    Args:
        ids: token ids, [batch, seq_len].
        t: index of each token in its document, [1 or batch, seq_len], -1 on padding.
        documents: of the batch.
        patterns: token ids, one or more each.
    """
    batch, seq_len = ids.shape
    t, ordinal = t.expand(batch, seq_len), documents.ordinal.expand(batch, seq_len)
    longest = torch.zeros(batch * seq_len, dtype=torch.int64, device=ids.device)  # one place a document is enough
    for pattern in patterns:
        ends_here = (t == documents.length - 1) & (t >= len(pattern) - 1)
        for back, token in enumerate(reversed(pattern)):
            ends_here &= nn.functional.pad(ids, (back, 0), value=-1)[:, :seq_len] == token  # `back` tokens before
        n_tokens = torch.where(ends_here, len(pattern), 0)
        longest = longest.scatter_reduce(0, ordinal.flatten(), n_tokens.flatten(), "amax")
    return longest[ordinal]


def checked_cues(name: str, cues: object, *, least: int) -> tuple[tuple[int, ...], ...]:
    """A set of cues, the patterns of `closing_tokens`, as tuples of token IDs.

    Args:
        name: of the user's argument, for the error.
        cues: what a user gave in place of an integer.
        least: smallest integer that is allowed in place of cues, for the error.

    Raises:
        ValueError: these are not different cues of one or more token IDs.
    """
    lists = isinstance(cues, Sequence) and not isinstance(cues, str) and all(isinstance(c, Sequence) for c in cues)
    as_tuples = tuple(tuple(cue) for cue in cues) if lists else ()  # type: ignore[attr-defined]
    ids = all(cue and all(type(token) is int for token in cue) for cue in as_tuples)
    if not as_tuples or not ids or len(set(as_tuples)) < len(as_tuples):
        raise ValueError(
            f"{name} must be an integer of at least {least}, or different cues as lists of one or more token ids, got "
            f"{cues!r}."
        )
    return as_tuples


def document_numbers(ids: torch.Tensor, t: torch.Tensor, documents: Documents) -> torch.Tensor:
    """A 32-bit hash of the tokens of each document, int64, in the shape of `documents.ordinal`.

    The sum of h(h(id) + t) over its tokens, modulo 2**32, where h is `mixed`. It does not depend on padding, neighbours
    or the place in the batch.

    Args:
        ids: token ids, [batch, seq_len].
        t: index of each token in its document, [1 or batch, seq_len], -1 on padding.
        documents: of the batch.
    """
    t = t.expand(ids.shape)
    hashes = torch.where(t < 0, 0, mixed((mixed(ids.long() & _WORD) + t) & _WORD))
    if documents.ordinal.shape[1] == 1:  # a row is a document
        return hashes.sum(1, keepdim=True) & _WORD
    sums = torch.zeros(hashes.numel(), dtype=torch.int64, device=ids.device)  # one place a document is enough
    return sums.scatter_add_(0, documents.ordinal.flatten(), hashes.flatten())[documents.ordinal] & _WORD


def count_documents(batch: dict[str, torch.Tensor]) -> int:
    """Number of documents in a batch of a TRL collator."""
    rows, seq_len = batch["input_ids"].shape
    documents = locate_documents(
        rows, seq_len, batch["input_ids"].device, batch.get("position_ids"), batch.get("attention_mask")
    )
    return int(documents.ordinal.max()) + 1
