"""Keyed random numbers: a draw is a function of (seed, step, sample) alone.

So a sample has the same draw after a resume, under gradient accumulation and on other ranks, and torch's generators
stay as they are. A draw neither waits for the GPU nor breaks a `torch.compile` graph: it is tensor arithmetic on the
device of the key, or Python arithmetic where the counter is plain numbers.
"""

from dataclasses import dataclass, replace
from typing import overload

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[torch.Tensor | int, torch.Tensor | int, torch.Tensor | int, torch.Tensor | int],
    key: tuple[int, int],
) -> tuple[torch.Tensor | int, torch.Tensor | int, torch.Tensor | int, torch.Tensor | int]:
    """Philox4x32-10: four words of 32 random bits for each 128-bit counter.

    A round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), with the key
    raised by the Weyl constants between rounds.

    Args:
        counter: four words in [0, 2**32), ints or int64 tensors that broadcast together.
        key: two words in [0, 2**32).

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _product(word: torch.Tensor | int, multiplier: int) -> tuple[torch.Tensor | int, torch.Tensor | int]:
    """The high and the low 32 bits of a product of two words."""
    # by halves, so that nothing overflows int64: in the C++ of torch.compile an overflow is undefined
    low = word * (multiplier & 0xFFFF)
    high = word * (multiplier >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


@overload
def between(word: torch.Tensor, low: torch.Tensor | int, high: torch.Tensor | int) -> torch.Tensor: ...


@overload
def between(word: torch.Tensor | int, low: torch.Tensor | int, high: torch.Tensor | int) -> torch.Tensor | int: ...


def between(word: torch.Tensor | int, low: torch.Tensor | int, high: torch.Tensor | int) -> torch.Tensor | int:
    """Map 32 random bits to an integer in low..high, both included, as `DrawKey.integers` does."""
    return low + ((word * (high - low + 1)) >> 32)


def mixed(word: torch.Tensor) -> torch.Tensor:
    """A permutation of 32-bit numbers, int64, each of whose bits depends on all bits of `word`.

    Source: the finalizer of MurmurHash3, Austin Appleby, public domain.
    """
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        product = _product(word ^ (word >> shift), multiplier)[1]
        assert isinstance(product, torch.Tensor)
        word = product
    return word ^ (word >> 16)


@dataclass(frozen=True)
class DrawKey:
    """What a draw depends on. Equal keys give equal draws on every device, rank and micro-batch.

    Args:
        seed: any integer; its low 64 bits count.
        step: optimizer step; an int64 tensor of shape [] in a traced graph, which would be traced again for each int.
        sample: ordinal of the document within the step, int64, [batch, 1] or [batch, seq_len]; None for a draw that all
            samples of the step share.
        stream: separates several views that draw for the same sample; int64 tensors broadcast with `sample`.
        progress: of training, from 0 to 1, float tensor of shape []; None, without a trainer, means the end.
        shared_on: device of draws where `sample` is None.
    """

    seed: int
    step: torch.Tensor | int
    sample: torch.Tensor | None
    stream: int | torch.Tensor = 0
    progress: torch.Tensor | None = None
    shared_on: torch.device | None = None

    def per_step(self) -> "DrawKey":
        """The key of the optimizer step, the same for all of its samples."""
        return replace(self, sample=None, shared_on=self.device)

    def per_forward(self) -> "DrawKey":
        """The key of a micro-batch: that of its first sample, for all samples."""
        return self if self.sample is None else replace(self, sample=self.sample.min())

    def substream(self, stream: int) -> "DrawKey":
        """The key of the `stream`-th part of a composed view."""
        return replace(self, stream=self.stream * 64 + stream + 1)

    def uniform(self, slot: int | torch.Tensor) -> torch.Tensor:
        """U[0, 1) with 53 random bits, float64, in the shape of `sample`. Each `slot` is an independent draw.

        Several slots, int64, broadcast with `sample`.
        """
        high, low = self._words(slot)
        bits = self._tensor((high << 21) + (low >> 11))
        return bits.double() * 2.0**-53

    def integers(self, low: torch.Tensor | int, high: torch.Tensor | int, slot: int | torch.Tensor) -> torch.Tensor:
        """U{low..high}, both included, int64, high - low < 2**31. Its bias is below (high - low) / 2**32."""
        return self._tensor(between(self._words(slot)[0], low, high))

    def rank(self, t: torch.Tensor, slot: int = 0) -> torch.Tensor:
        """A random order of the tokens of each document: all L! permutations of 0 .. L - 1 are equally likely.

        rank(t) is the number of tokens of the document whose number u = uniform(slot + t) is below that of token t.

        Args:
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding, as in `View.draw_for`.
            slot: first of the slots that are drawn; token t takes slot + t.

        Returns:
            int64, [batch, seq_len]; any number on padding.
        """
        _, _, order, begin = self._in_order(t, slot)
        column = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        return torch.empty_like(order).scatter_(-1, order, column) - begin

    def sorted(self, t: torch.Tensor, slot: int = 0) -> torch.Tensor:
        """The t-th smallest of L numbers from U[0, 1) at token t of a document of L tokens.

        Args:
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding, as in `View.draw_for`.
            slot: first of the slots that are drawn; the numbers are those of slots slot .. slot + L - 1.

        Returns:
            float64, [batch, seq_len]; any number on padding.
        """
        u, real, order, begin = self._in_order(t, slot)
        passed = real.long().cumsum(-1)
        before = (passed - real.long()).gather(-1, begin)
        return u.gather(-1, order).gather(-1, begin + (passed - before - 1).clamp(min=0))

    def pick(self, candidates: torch.Tensor, t: torch.Tensor, slot: int = 0) -> torch.Tensor:
        """The index t of one candidate of each document, all of its k candidates equally likely; -1 if it has none.

        Args:
            candidates: bool, [batch, seq_len].
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding, as in `View.draw_for`.
            slot: of the draw.

        Returns:
            int64 in the shape of `sample`.
        """
        t = t.expand(candidates.shape)
        candidates = candidates & (t >= 0)
        document = self._documents(t)
        of_token = document.expand(t.shape)
        counts = torch.zeros(len(t), t.shape[1] + 1, dtype=torch.int64, device=t.device)
        counts.scatter_add_(1, of_token, candidates.long())
        number = candidates.long().cumsum(1) - (counts.cumsum(1) - counts).gather(1, of_token)
        taken = self.integers(1, counts.gather(1, document).clamp(min=1), slot)
        picked = torch.full_like(counts, -1)
        picked.scatter_reduce_(1, of_token, torch.where(candidates & (number == taken), t, -1), "amax")
        return picked.gather(1, document)

    def _documents(self, t: torch.Tensor) -> torch.Tensor:
        """Number of each document in its row, in the shape of `sample`; the padding before the first one joins it."""
        if self.sample is not None and self.sample.shape[-1] == 1:  # a row is a document
            return torch.zeros_like(t[..., :1])
        return (t == 0).cumsum(-1).clamp(min=1)

    def _in_order(self, t: torch.Tensor, slot: int) -> tuple[torch.Tensor, ...]:
        """Numbers of the tokens, which are real, the columns by document and number, and where each document begins."""
        u = self.uniform(slot + t.clamp(min=0))
        t = t.expand(u.shape)
        document = self._documents(t).expand(u.shape)
        order = torch.where(t < 0, torch.inf, u).argsort(dim=-1, stable=True)  # padding comes behind its document
        order = order.gather(-1, document.gather(-1, order).argsort(dim=-1, stable=True))
        column = torch.arange(t.shape[-1], device=t.device)
        begins = torch.nn.functional.pad(document[..., 1:] != document[..., :-1], (1, 0))
        return u, t >= 0, order, torch.where(begins, column, 0).cummax(-1).values

    def words(self, *slots: range) -> tuple[torch.Tensor, ...]:
        """The 32 random bits that `integers` maps by `between`, of each slot, int64 in the shape of `sample`.

        One computation for all slots; each call of `integers` is two hundred small GPU kernels.
        """
        numbers = torch.cat([torch.arange(each.start, each.stop, each.step, device=self.device) for each in slots])
        dims = [part.dim() for part in (self.sample, self.stream) if isinstance(part, torch.Tensor)]
        words, _ = self._words(numbers.view(-1, *[1] * max(dims, default=0)))
        assert isinstance(words, torch.Tensor)
        return words.unbind(0)

    def turn(self, n: int) -> torch.Tensor:
        """The step modulo n, int64 of shape []."""
        return self._tensor(self.step % n)

    def _words(self, slot: int | torch.Tensor) -> tuple[torch.Tensor | int, torch.Tensor | int]:
        sample = 0 if self.sample is None else self.sample
        counter = (self.step & _MASK, sample & _MASK, self.stream & _MASK, slot)
        key = (self.seed & _MASK, (self.seed >> 32) & _MASK)
        first, second, _, _ = philox4x32(counter, key)
        return first, second

    @property
    def device(self) -> torch.device | None:
        """Device of the draws."""
        return self.shared_on if self.sample is None else self.sample.device

    def _tensor(self, value: torch.Tensor | int) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return torch.full((), value, dtype=torch.int64, device=self.device)  # a fill, where a copy would wait
