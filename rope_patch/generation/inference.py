"""A causal LM for inference: hidden states and log-probabilities without the logits of a whole sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..attention.plain import last_hidden_states
from ..describe import describe
from ..families.capabilities import why_no_head
from ..forward.cache_arguments import cache_argument
from ..rescalings.in_place import pretrained_window
from ..rope.rotary import base_model_name, find_causal_lm, rows_forgotten


class InferenceModel:
    """A Transformers causal LM, patched or not, bare or with adapters.

    Args:
        model: the model; it is not changed.

    Raises:
        ValueError: it has no output head, no Transformers model below its head, or something between the two.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.causal_lm: Any = find_causal_lm(model)
        self.head: Any = self.causal_lm.get_output_embeddings()
        if not isinstance(getattr(self.head, "weight", None), torch.Tensor):
            raise ValueError(f"{type(self.causal_lm).__name__} has no linear output head: a causal LM is needed.")
        name = base_model_name(self.causal_lm)
        if name is None:
            raise ValueError(
                f"{type(self.causal_lm).__name__} has no Transformers model below its output head: not supported."
            )
        self._base_name: str = name
        reason = why_no_head(self.causal_lm, getattr(self.causal_lm, name))
        if reason is not None:
            raise ValueError(reason)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self.head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the token IDs."""
        return self.causal_lm.get_input_embeddings().weight.device

    @cached_property
    def trained_window(self) -> int | None:
        """The context window of pretraining, even if a rescaled config states more; None if no config states it."""
        description = describe(self.causal_lm)
        return pretrained_window(description.native_rope_parameters, description.trained_window)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch off gradients and training mode, and so the views of training.

        Afterwards every module has its earlier mode, and dynamic NTK its earlier frequencies.
        """
        was_training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), rows_forgotten(self.model):
                yield
        finally:
            for module, training in was_training.items():  # a module may have another mode than the model
                module.training = training

    def hidden(self, ids: torch.Tensor, cache: Any = None, **inputs: Any) -> torch.Tensor:
        """Last hidden states, [batch, seq_len, hidden], of ids [batch, seq_len] that follow the tokens in `cache`.

        Whole sequences are read by `last_hidden_states`, which avoids masks of n x n.
        """
        if cache is None and not inputs:
            return last_hidden_states(self.causal_lm, ids)
        decoder = getattr(self.causal_lm, self._base_name)
        cached = {} if cache is None else cache_argument(decoder, cache)
        return decoder(input_ids=ids, use_cache=cache is not None, **cached, **inputs).last_hidden_state

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the next token, float32 [n, vocab_size], for hidden states [n, hidden] of a small n."""
        return self._logits(hidden).float().log_softmax(-1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden], by the model's forward with a stand-in decoder."""
        modules, name = self.causal_lm._modules, self._base_name
        decoder = modules[name]
        modules[name] = _KnownStates(hidden[None], decoder)
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)  # only its shape counts
            return self.causal_lm(input_ids=ids, use_cache=False).logits[0]
        finally:
            modules[name] = decoder


class _KnownStates(nn.Module):
    """Stands in for a decoder whose hidden states are known; other attributes are the decoder's."""

    def __init__(self, hidden: torch.Tensor, decoder: nn.Module) -> None:
        super().__init__()
        self.hidden = hidden
        self.__dict__["decoder"] = decoder  # not a child: modules have one parent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["decoder"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self.hidden)


class _Output(BaseModelOutputWithPast):
    def __getattr__(self, name: str) -> None:
        """None for what a family's decoder returns beside hidden states."""
        return None
