"""Estimate how long a model takes to write its own texts, from a few timed decoding steps."""

import copy
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rope_patch.generation.decoding import Decoder, Sampling
from rope_patch.generation.generation import bytes_per_token
from rope_patch.generation.kv_rows import KVRows

from ..rows.sampling import AT_ONCE
from .facts import ModelFacts

_WEIGHTS = 2**27  # bytes of the timed layers; of a larger model only some are timed
_TIMED = 5  # steps
_FIRST = 2  # steps that do not count, as they allocate buffers and capture a CUDA graph
_BEGUN = 300  # tokens of a text when steps are timed, as in its middle

# decoding steps of a batch of texts, and mean of the tokens that are kept of each text. SmolLM2-135M-Instruct ended 6
# of 16 replies within 512 tokens, of chats of 226 tokens, and wrote 1.4 user's turns of up to 96 tokens for each used
# one; Gemma-3-270M wrote texts of 722 tokens, of at most 1024
_BATCH = {"chats": (650, 85), "own_texts": (1024, 722)}


def seconds_of_writing(facts: ModelFacts, device: str, kind: str, tokens: int, a_step: float) -> float:
    """Seconds to write `tokens` of "chats" or "own_texts", with `a_step` seconds for a decoding step of a batch."""
    steps, kept = _BATCH[kind]
    longest = min(steps, facts.window // 2)
    batches = -(-tokens // (AT_ONCE[device] * min(kept, longest)))
    return batches * longest * a_step


def seconds_a_step(facts: ModelFacts, device: str) -> float | None:
    """Seconds of a decoding step of a batch of texts, or None if the model has no cache that this can time.

    Times a model of the same shape with random weights. A model of more than 128 MiB is timed with fewer layers, and
    the time is scaled by the weights that a step reads.
    """
    dtype = torch.float32 if device == "cpu" else facts.dtype
    size = facts.size
    layer_size = size.in_layers // size.n_layers
    n_layers = min(size.n_layers, max(_WEIGHTS // (layer_size * dtype.itemsize), 1))
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(_with_layers(facts.config, n_layers), dtype=dtype)
    model.eval()
    if bytes_per_token(model) is None:
        return None
    rows = AT_ONCE[device]
    while True:
        try:
            head = size.vocabulary * size.hidden
            share = (size.in_layers + head) / (n_layers * layer_size + head)
            return share * _timed(model, rows, min(_BEGUN, facts.window // 2), size.vocabulary)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2


def _timed(model: Any, n_rows: int, begun: int, vocabulary: int) -> float:
    device = model.get_input_embeddings().weight.device
    ends: list[float] = []
    with torch.no_grad():
        rows = KVRows(model, n_rows, begun + _TIMED + 1)
        logits = torch.randn(n_rows, vocabulary, device=device)
        decoder = Decoder(rows, Sampling(1.0, 0, logits))
        with rows.attention():
            decoder.decode(
                logits,
                [begun] * n_rows,
                [_TIMED + 1] * n_rows,
                (),
                step_done=lambda: ends.append(time.perf_counter()),
            )
    return statistics.median(b - a for a, b in zip(ends[_FIRST:], ends[_FIRST + 1 :], strict=False))


def _with_layers(config: Any, n_layers: int) -> Any:
    """The config of a model with the first layers only."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:n_layers]
    text.num_hidden_layers = n_layers
    return config
