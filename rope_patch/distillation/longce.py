"""LongCE: tokens weigh as much as a long context helps to predict them."""

from dataclasses import dataclass
from typing import Any

import torch

from rope_kernels import linear_ce_kl

from ..heads import logit_transform
from ..patch import rope_view

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class LongCE:
    """loss = mean over tokens of w_i CE_i, w_i = min(p(x_i | all before) / p(x_i | a short context), cap).

    With K = short_context and d = stride, document tokens start .. start + K + d for start = 0, d, 2d, ... are read as
    sequences of their own, and the last d of them get the weight; each has seen K to K + d - 1 tokens there. Tokens
    before K, and documents of at most K tokens, weigh 1. Weights are constants; the mean divides by the number of
    tokens, not by the sum of weights.

    Args:
        short_context: K, in tokens.
        stride: d, in tokens.
        cap: gamma.

    Source: LongCE, arXiv:2410.23771, and its released code.
    """

    short_context: int = 4096
    stride: int = 1024
    cap: float = 5.0

    def __post_init__(self) -> None:
        for name in ("short_context", "stride"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
        if not 0 < self.cap < float("inf"):
            raise ValueError(f"cap must be a number above 0, got {self.cap!r}.")

    @torch.no_grad()
    def reference(
        self, core: Any, decoder: Any, ids: torch.Tensor, ordinal: torch.Tensor, t: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Cross-entropy of the label of each query in its short context, float32 [batch, n], nan where it has none.

        Args:
            core: the causal LM, for its head.
            decoder: its decoder.
            ids: [batch, n].
            ordinal: of each token's document, [batch, n].
            t: index of each token in its document, negative or repeated on padding, [batch, n].
            labels: label that each query predicts, -100 for none, [batch, n].
        """
        found = torch.full(ids.shape, float("nan"), device=ids.device)
        windows = self._windows(ordinal, t, labels)
        size = self.short_context + self.stride
        head = core.get_output_embeddings()
        weight = head.weight.detach()
        bias = None if getattr(head, "bias", None) is None else head.bias.detach()
        scale, softcap = logit_transform(core.config.get_text_config())
        at_a_time = max(1, ids.numel() // size)
        for first in range(0, len(windows), at_a_time):
            chosen = windows[first : first + at_a_time]
            rows = torch.zeros(len(chosen), size, dtype=ids.dtype, device=ids.device)
            for i, (row, begin, length) in enumerate(chosen):
                rows[i, :length] = ids[row, begin : begin + length]
            # padding is on the right, where nothing real looks
            with rope_view(decoder, "standard"):
                hidden = decoder(input_ids=rows, use_cache=False).last_hidden_state
            for i, (row, begin, length) in enumerate(chosen):
                queries = slice(self.short_context - 1, length - 1)
                targets = labels[row, begin + self.short_context - 1 : begin + length - 1]
                _, metrics = linear_ce_kl(
                    hidden[i, queries].to(weight.dtype),
                    None,
                    weight,
                    targets,
                    torch.zeros(len(targets), device=ids.device),
                    None,
                    bias=bias,
                    logit_scale=scale,
                    softcap=softcap,
                )
                ce = torch.where(targets == IGNORE_INDEX, float("nan"), metrics.ce.float())
                found[row, begin + self.short_context - 1 : begin + length - 1] = ce
        return found

    def _windows(self, ordinal: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> list[tuple[int, int, int]]:
        """(row, first token, tokens) of each window that holds a label behind its short context."""
        windows = []
        for row in range(len(t)):
            # a document's real tokens count up from 0; what does not is padding
            firsts = (t[row] == 0).nonzero().flatten().tolist()
            for first in firsts:
                length = _run(t[row, first:], ordinal[row, first:])
                for start in range(0, max(length - self.short_context, 0), self.stride):
                    end = min(start + self.short_context + self.stride, length)
                    queries = labels[row, first + start + self.short_context - 1 : first + end - 1]
                    if bool((queries != IGNORE_INDEX).any()):
                        windows.append((row, first + start, end - start))
        return windows


def _run(t: torch.Tensor, ordinal: torch.Tensor) -> int:
    """Tokens from the first on that are of one document and follow each other."""
    same = (ordinal == ordinal[0]) & (t == torch.arange(len(t), device=t.device))
    return int(same.long().cumprod(0).sum())
