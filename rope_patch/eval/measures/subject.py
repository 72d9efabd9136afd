"""The model that is measured: losses without the logits of a whole row."""

from functools import cached_property

import torch
from torch.nn import functional as F  # noqa: N812

from rope_kernels import linear_ce_rows

from ...generation.inference import InferenceModel

_CHUNK_BYTES = 2**28  # of float32 logits


class Subject(InferenceModel):
    """A causal LM that reads rows of token IDs."""

    def check_rows(self, rows: torch.Tensor, at_least: int = 2) -> None:
        """Raise ValueError unless `rows` is [n_rows, seq_len], seq_len >= `at_least`, with ids of the vocabulary."""
        if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < at_least:
            raise ValueError(f"rows must be [n_rows, seq_len] with seq_len >= {at_least}, got {tuple(rows.shape)}.")
        if rows.min() < 0 or rows.max() >= self.vocab_size:
            raise ValueError(
                f"rows must hold ids in [0, {self.vocab_size}), got values in [{rows.min()}, {rows.max()}]: "
                "were they made by another tokenizer?"
            )

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of targets [batch, n], in nats, float32 [batch, n].

        Args:
            hidden: last hidden states of the tokens before the targets, [batch, n, hidden].
            targets: token ids, int64 [batch, n].
        """
        # with a device map, the head may be on another GPU than the hidden states and the ids
        rows, labels = (x.to(self.head.weight.device) for x in (hidden.flatten(0, 1), targets.flatten()))
        if self._head_is_linear:
            bias = getattr(self.head, "bias", None)
            return linear_ce_rows(rows, self.head.weight, labels, bias=bias).view(targets.shape)
        n_rows = max(1, _CHUNK_BYTES // (4 * self.vocab_size))
        parts = [
            F.cross_entropy(self._logits(h).float(), t, reduction="none")
            for h, t in zip(rows.split(n_rows), labels.split(n_rows), strict=True)
        ]
        return torch.cat(parts).view(targets.shape)

    @cached_property
    def _head_is_linear(self) -> bool:
        """Whether logits are hidden W^T + b: some families scale or cap them, and adapters may change the head."""
        bias = getattr(self.head, "bias", None)
        with torch.no_grad():
            probe = self.causal_lm.get_input_embeddings().weight[:16].detach().to(self.head.weight)
            # scaled so that the largest logit is 1000, which any cap would change
            probe = probe * (1000 / F.linear(probe, self.head.weight).abs().max().clamp(min=1e-6))
            plain, logits = F.linear(probe, self.head.weight, bias).float(), self._logits(probe).float()
        return bool((logits - plain).abs().max() <= 1e-3 * plain.abs().max())
