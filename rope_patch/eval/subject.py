"""The model under measurement: hidden states, losses and log-probabilities without logits of a whole row."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rope_kernels import linear_ce_rows

from ..describe import describe
from ..rotary import find_core

_LOGIT_TRANSFORMS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping")


class Subject:
    """A Transformers causal LM, patched or not, bare or with LoRA-like adapters, whose head is one linear layer.

    Args:
        model: the model; it is not changed.

    Raises:
        ValueError: no such head, or logits that are transformed after it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.core: Any = find_core(model)
        self.head: Any = self.core.get_output_embeddings()
        if not isinstance(getattr(self.head, "weight", None), torch.Tensor):
            raise ValueError(f"{type(self.core).__name__} has no linear output head: a causal LM is needed.")
        for name in _LOGIT_TRANSFORMS:
            if getattr(self.core.config.get_text_config(decoder=True), name, None) not in (None, 1.0):
                raise ValueError(
                    f"models that transform their logits ({name}) are not supported by rope_patch.eval yet."
                )

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.core.get_input_embeddings().weight.device

    @cached_property
    def trained_window(self) -> int | None:
        """Positions that the model was pretrained on, also where a rescaled config promises more; None if unnamed."""
        found = describe(self.core)
        schedule = found.native_rope_parameters
        return schedule.get("original_max_position_embeddings") or found.trained_window

    def check_rows(self, rows: torch.Tensor, at_least: int = 2) -> None:
        """Refuse rows that this model cannot read.

        Raises:
            ValueError: not [n_rows, seq_len] with seq_len >= `at_least`, or ids outside the vocabulary.
        """
        if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < at_least:
            raise ValueError(f"rows must be [n_rows, seq_len] with seq_len >= {at_least}, got {tuple(rows.shape)}.")
        if rows.min() < 0 or rows.max() >= self.vocab_size:
            raise ValueError(
                f"rows must hold ids in [0, {self.vocab_size}), got values in [{rows.min()}, {rows.max()}]: "
                "were they made by another tokenizer?"
            )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients and eval mode, so that views which are sampled in training are not in force."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def hidden(self, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Last hidden states, [batch, seq_len, hidden], of ids [batch, seq_len]."""
        return self.core.base_model(input_ids=ids, use_cache="past_key_values" in inputs, **inputs).last_hidden_state

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats, float32 [batch, n], of targets [batch, n] given the hidden states before them."""
        rows = linear_ce_rows(
            hidden.flatten(0, 1), self.head.weight, targets.flatten(), bias=getattr(self.head, "bias", None)
        )
        return rows.view(targets.shape)

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the next token, float32 [n, vocab_size], for a small n of hidden states [n, hidden]."""
        return self.head(hidden).float().log_softmax(-1)
