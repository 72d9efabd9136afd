"""LongCE: next-token loss that weighs each token by how much a long context helps to predict it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from rope_kernels.vocabulary.checks import IGNORE_INDEX

from ..base.validators import require_integer, require_number
from ..layout.labelled import Labelled
from ..patch import rope_view
from .forward_loss import without_gradient
from .heads import head_losses


@dataclass(frozen=True, kw_only=True)
class LongCE:
    """loss = mean over tokens of w_i CE_i, w_i = min(p(x_i | all before) / p(x_i | a short context), cap).

    With K = short_context and d = stride, document tokens start .. start + K + d for start = 0, d, 2d, ... are read as
    sequences of their own, and the last d of them get the weight; each has seen K to K + d - 1 tokens there. Tokens
    before K, and documents of at most K tokens, have weight 1. Weights have no gradient; the mean divides by the number
    of tokens, not by the sum of weights.

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
            require_integer(name, getattr(self, name), least=1)
        require_number("cap", self.cap)

    def check_length(self, length: int, remedy: str) -> None:
        """Raise ValueError if no document is longer than the short context, so that all weights would be 1.

        Args:
            length: tokens of the longest document.
            remedy: for the error, how to train without these weights.
        """
        if length <= self.short_context:
            raise ValueError(
                f"short_context must be below the length of the longest document, got {self.short_context} and "
                f"documents of at most {length} tokens: all of their tokens would weigh 1. Give a smaller "
                f"short_context or longer documents, or {remedy}."
            )

    @torch.no_grad()
    def reference(self, causal_lm: Any, decoder: Any, labelled: Labelled) -> torch.Tensor:
        """Cross-entropy of the label of each query in its short context, float32 [batch, n], nan where it has none."""
        ids = labelled.ids
        reference = torch.full(ids.shape, float("nan"), device=ids.device).flatten()  # [batch n]
        size, seq_len = self.short_context + self.stride, ids.shape[1]
        # [windows, 2]: the first token among the flattened tokens, and the number of tokens
        windows = torch.tensor(
            [
                (row * seq_len + first + start, min(size, length - start))
                for row, first, length in labelled.spans
                for start in range(0, max(length - self.short_context, 0), self.stride)
            ],
            dtype=torch.int64,
            device=ids.device,
        ).view(-1, 2)
        offset = torch.arange(size, device=ids.device)
        labels = labelled.next_label.flatten()
        parts = list(windows.split(max(1, ids.numel() // size))) if len(windows) else []
        # under ZeRO-3 and FSDP2, ranks gather weights together, so each runs as many forwards
        if any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") for p in decoder.parameters()):
            most = torch.tensor(len(parts), device=ids.device)
            distributed.all_reduce(most, distributed.ReduceOp.MAX)
            nothing = torch.tensor([[0, 1]], device=ids.device)  # a window of one token scores nothing
            parts += [nothing] * (int(most) - len(parts))
        for chosen in parts:
            begin, length = chosen[:, :1], chosen[:, 1:]  # [m, 1] each
            token = (begin + offset).clamp(max=ids.numel() - 1)  # [m, size]
            # padding is on the right, where no real token attends to it
            rows = ids.flatten()[token].masked_fill(offset >= length, 0)
            with rope_view(decoder, "standard"), without_gradient(ids.device.type):
                hidden = decoder(input_ids=rows, use_cache=False).last_hidden_state  # [m, size, H]
            scored = (offset >= self.short_context - 1) & (offset < length - 1) & (labels[token] != IGNORE_INDEX)
            queries = token[scored]  # [scored], which have seen at least K tokens
            none = torch.zeros(len(queries), device=ids.device)  # weights: only metrics are read
            _, metrics = head_losses(causal_lm, hidden[scored], None, labels[queries], none, None)
            reference[queries] = metrics.ce.float()
        return reference.view(ids.shape)


@dataclass(frozen=True)
class ShortContexts:
    """`LongCE.reference` of a batch, [batch, n], where token weights need it."""

    ce: torch.Tensor | None = None  # for the weights of the cross-entropy
    kl: torch.Tensor | None = None  # for `ViewConsistency.kl_longce`


class DFT(LongCE):
    """loss = mean over tokens of p_i CE_i, p_i the probability that the model gives the token, a constant.

    It is LongCE's weight for a short context that predicts every token with certainty.

    Source: DFT, arXiv:2508.05629, as TRL has it.
    """

    def check_length(self, length: int, remedy: str) -> None:
        """Accept documents of any length."""

    def reference(self, causal_lm: Any, decoder: Any, labelled: Labelled) -> torch.Tensor:
        """Cross-entropies of 0, as in a context that predicts every token."""
        return torch.zeros(labelled.ids.shape, device=labelled.ids.device)


def head_weights(longce: LongCE | None, short_ce: torch.Tensor | None, queries: torch.Tensor) -> dict[str, Any]:
    """The arguments of `rope_kernels.linear_ce_kl` for token weights, {} without them.

    Args:
        longce: the weights, or None.
        short_ce: `LongCE.reference` of the batch, [batch, n], or None.
        queries: indices of the rows among the flattened tokens, [N].
    """
    if longce is None or short_ce is None:
        return {}
    return {"ce_reference": short_ce.flatten()[queries], "ce_cap": longce.cap}
