"""Cross-entropy of each token given all before it, by its position: where a model's window ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from rope_kernels import linear_ce_rows

from ..rotary import find_core

# positions that every window holds: left out of means, since their short contexts make the loss large in any model
FIRST_POSITION = 64

_LOGIT_TRANSFORMS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping")


@dataclass(frozen=True, eq=False)
class LossByPosition:
    """Mean cross-entropy by target position.

    Args:
        loss: entry p is the mean over rows of -log p(x_p | x_<p), in nats, float64 [seq_len]; entry 0 is nan, as
            nothing predicts the first token.
        n_rows: rows that the means are over.
    """

    loss: torch.Tensor
    n_rows: int

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return len(self.loss)

    def mean(self, first: int, end: int) -> float:
        """Mean loss over target positions first..end-1, in nats."""
        if not 1 <= first < end <= self.seq_len:
            raise ValueError(
                f"positions must satisfy 1 <= first < end <= {self.seq_len}, got first={first} and end={end}."
            )
        return self.loss[first:end].mean().item()

    def in_window(self, window: int) -> float:
        """Mean loss over target positions 64..window, in nats."""
        return self.mean(FIRST_POSITION, window + 1)

    def cliff(self, window: int) -> float:
        """Mean loss over target positions beyond `window` minus that over 64..window, in nats.

        Source: PosAug, FoGen 2026, its cliff metric.
        """
        return self.mean(window + 1, self.seq_len) - self.in_window(window)

    def bins(self, edges: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss between neighbouring `edges`, as {first, end, loss}."""
        pairs = zip(edges, edges[1:], strict=False)
        return [{"first": a, "end": b, "loss": self.mean(max(a, 1), b)} for a, b in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {"seq_len": self.seq_len, "n_rows": self.n_rows, "loss": [None, *self.loss[1:].tolist()]}


@torch.no_grad()
def loss_by_position(
    model: nn.Module, rows: torch.Tensor, *, batch_size: int = 1, progress: bool = True, title: str = "loss by position"
) -> LossByPosition:
    """Run `rows` through `model` in one causal forward each and average the loss at every position.

    Neither n x n nor n x vocabulary values are ever held: attention is the model's own, and the head is applied to
    chunks of tokens. Training mode is switched off meanwhile, so views that are sampled in training are not in force.

    Args:
        model: a Transformers causal LM, patched or not, bare or with LoRA-like adapters.
        rows: token ids, int64 [n_rows, seq_len], seq_len >= 2; no padding.
        batch_size: rows in a forward.
        progress: whether to show a bar with the time left.
        title: its label.

    Raises:
        ValueError: rows of another shape, ids outside the vocabulary, or a model whose head is not one linear layer.
    """
    core = find_core(model)
    head = core.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), torch.Tensor):
        raise ValueError(f"{type(core).__name__} has no linear output head: loss_by_position needs a causal LM.")
    for name in _LOGIT_TRANSFORMS:
        if getattr(core.config.get_text_config(decoder=True), name, None) not in (None, 1.0):
            raise ValueError(f"models that transform their logits ({name}) are not supported by loss_by_position yet.")
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < 2:
        raise ValueError(f"rows must be [n_rows, seq_len] with seq_len >= 2, got {tuple(rows.shape)}.")
    if rows.min() < 0 or rows.max() >= head.weight.shape[0]:
        raise ValueError(
            f"rows must hold ids in [0, {head.weight.shape[0]}), got values in [{rows.min()}, {rows.max()}]: "
            "were they made by another tokenizer?"
        )
    device = core.get_input_embeddings().weight.device
    total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        for batch in tqdm(rows.split(batch_size), desc=title, unit="batch", disable=not progress):
            ids = batch.to(device)
            hidden = core.base_model(input_ids=ids, use_cache=False).last_hidden_state
            losses = linear_ce_rows(
                hidden[:, :-1].flatten(0, 1), head.weight, ids[:, 1:].flatten(), bias=getattr(head, "bias", None)
            )
            total += losses.view(len(ids), -1).double().sum(0).cpu()
    finally:
        model.train(was_training)
    unknown = torch.full((1,), torch.nan, dtype=torch.float64)
    return LossByPosition(torch.cat([unknown, total / len(rows)]), len(rows))
