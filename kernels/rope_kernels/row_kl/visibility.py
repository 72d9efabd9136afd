"""Which keys a query sees: causality, padding and packed documents as per-token integers that kernels can read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..common.checks import described, require_tensor


@dataclass(frozen=True)
class Visibility:
    """Key j is visible to query i iff both are of one document, and j <= i where attention is causal.

    Args:
        causal: whether later keys are hidden.
        document: [batch, n] int32, equal for tokens of one document, -1 for padding. None: one document, no padding.
        first: [batch, n] int32, a bound on the tokens that token i can meet: none before `first`. None with `document`.
        end: [batch, n] int32, nor any from `end` on. None with `document`.

    Raises:
        ValueError: a type, shape, dtype or device is not as above.
    """

    causal: bool
    document: torch.Tensor | None = None
    first: torch.Tensor | None = None
    end: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal must be True or False, got {described(self.causal)}.")
        if all(x is None for x in self.tensors):
            return
        allowed = "int32 [batch, n], all three of one shape and device, or all None: Visibility.of_documents makes them"
        for name, x in zip(("document", "first", "end"), self.tensors, strict=True):
            require_tensor(name, x, allowed)
            assert x is not None and self.document is not None
            if x.ndim != 2 or x.dtype != torch.int32 or x.shape != self.document.shape:
                raise ValueError(f"{name} must be {allowed}, got {described(x)}.")
            if x.device != self.document.device:
                raise ValueError(f"{name} must be {allowed}, got {described(x)} beside {described(self.document)}.")

    @classmethod
    def of_documents(cls, document: torch.Tensor, causal: bool = True) -> "Visibility":
        """From the document of each token: documents are runs of one number, which padding may interrupt.

        Args:
            document: [batch, n] integers, -1 on padding. A number that comes again after another is another document.
            causal: whether later keys are hidden.

        Raises:
            ValueError: a shape or dtype is not as above.
        """
        allowed = "[batch, n] integers, -1 on padding"
        require_tensor("document", document, allowed)
        if document.ndim != 2 or document.is_floating_point() or document.is_complex() or document.dtype == torch.bool:
            raise ValueError(f"document must be {allowed}, got {described(document)}.")
        batch, seq_len = document.shape
        index = torch.arange(seq_len, device=document.device).expand(batch, -1)  # [batch, n], and so is all below
        # padding counts with the document before it
        last = torch.where(document >= 0, index, 0).cummax(1).values
        carried = document.gather(1, last)
        begins = torch.ones_like(carried, dtype=torch.bool)
        begins[:, 1:] = carried[:, 1:] != carried[:, :-1]
        first = torch.where(begins, index, 0).cummax(1).values
        ends = torch.ones_like(begins)
        ends[:, :-1] = begins[:, 1:]
        after = torch.where(ends, index, seq_len).flip(1).cummin(1).values.flip(1)  # the next end at or after a token
        end = last.gather(1, after) + 1  # without the padding behind a document
        # renumbered, so that no two runs share a number
        runs = torch.where(document >= 0, begins.cumsum(1), -1)
        return cls(causal, *(x.int().contiguous() for x in (runs, first, end)))

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
        of_query = self.document[:, None, rows, None]  # [batch, 1, n_rows, 1]
        return seen & (of_query == self.document[:, None, None, keys]) & (of_query >= 0)


def visibility_of(
    name: str,
    x: torch.Tensor,
    causal: bool | None,
    key_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    visibility: Visibility | None,
) -> Visibility:
    """The visibility for argument `name`, `x` [batch, n_heads, n, head_dim], given whole or as its three parts.

    Raises:
        ValueError: both were given, or one does not fit `x`.
    """
    batch, _, seq_len, _ = x.shape
    if visibility is None:
        causal = True if causal is None else causal
        return make_visibility(batch, seq_len, x.device, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
    if not isinstance(visibility, Visibility):
        raise ValueError(f"visibility must be a Visibility or None, got {described(visibility)}.")
    for beside, value in (("causal", causal), ("key_mask", key_mask), ("cu_seqlens", cu_seqlens)):
        if value is not None:
            raise ValueError(
                f"{beside} must be None beside visibility, got {described(value)}: give it to make_visibility instead."
            )
    document = visibility.document
    if document is not None and (document.shape != (batch, seq_len) or document.device != x.device):
        raise ValueError(
            f"visibility must be of [{batch}, {seq_len}] tokens on {x.device} as {name} is, got one of "
            f"{described(document)}."
        )
    return visibility


def make_visibility(
    batch: int,
    seq_len: int,
    device: torch.device,
    *,
    causal: bool,
    key_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
) -> Visibility:
    """Visibility from padding and document borders.

    Args:
        batch: rows.
        seq_len: tokens in a row, n.
        device: of the tensors that are masked.
        causal: whether later keys are hidden.
        key_mask: [batch, n] bool, False on padding, which neither sees nor is seen.
        cu_seqlens: [n_documents + 1] int32 or int64, or a list, where documents begin in the batch * n tokens in row
            order: 0 first, batch * n last, rising, with every start of a row among them.

    Raises:
        ValueError: a shape, dtype, device or order is not as above. The order of borders on a GPU is asserted on the
            GPU, without a wait: wrong borders end in CUDA's device-side assert.
    """
    if key_mask is None and cu_seqlens is None:
        return Visibility(causal)
    document = torch.zeros(batch, seq_len, dtype=torch.int32, device=device)
    if cu_seqlens is not None:
        borders = _borders(cu_seqlens, batch, seq_len).to(device, torch.int64)
        tokens = torch.arange(batch * seq_len, device=device)
        # number of borders at or before each token
        document = torch.searchsorted(borders, tokens, right=True).view(batch, seq_len).int()
    if key_mask is not None:
        allowed = f"[{batch}, {seq_len}] bool on {device}"
        require_tensor("key_mask", key_mask, allowed)
        if key_mask.shape != (batch, seq_len) or key_mask.dtype != torch.bool or key_mask.device != device:
            raise ValueError(f"key_mask must be {allowed}, got {described(key_mask)}.")
        document = document.masked_fill(~key_mask, -1)
    return Visibility.of_documents(document, causal)


def _borders(cu_seqlens: torch.Tensor | Sequence[int], batch: int, seq_len: int) -> torch.Tensor:
    """`cu_seqlens` as a tensor, if it is as `make_visibility` wants it."""
    n_tokens = batch * seq_len
    allowed = f"cu_seqlens must be [n_documents + 1] integers rising from 0 to {n_tokens}"
    if not isinstance(cu_seqlens, torch.Tensor):
        if not isinstance(cu_seqlens, (list, tuple)) or not all(type(border) is int for border in cu_seqlens):
            raise ValueError(f"{allowed}, a tensor or a list, got {described(cu_seqlens)}.")
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int64)
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        raise ValueError(f"{allowed}, got {described(cu_seqlens)}.")
    starts = f"cu_seqlens must hold every start of a row, multiples of {seq_len}, as documents end with rows."
    # reading borders here would wait for the GPU, or break the graph
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        ends = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == n_tokens)
        torch._assert_async(ends & (cu_seqlens[1:] > cu_seqlens[:-1]).all(), f"{allowed}.")
        rows = torch.arange(0, n_tokens, seq_len, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        place = torch.searchsorted(cu_seqlens, rows).clamp(max=len(cu_seqlens) - 1)  # where each start should stand
        torch._assert_async((cu_seqlens[place] == rows).all(), starts)
        return cu_seqlens
    borders = cu_seqlens.tolist()
    rises = all(a < b for a, b in zip(borders, borders[1:], strict=False))
    if borders[0] != 0 or borders[-1] != n_tokens or not rises:
        raise ValueError(f"{allowed}, got {borders if len(borders) < 9 else f'{borders[:4]} .. {borders[-4:]}'}.")
    if not set(range(0, n_tokens, seq_len)) <= set(borders):
        raise ValueError(starts)
    return cu_seqlens
