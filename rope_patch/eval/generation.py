"""Greedy answers to long prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from .subject import Subject

# queries read at once: attention scores and MLP activations of a longer chunk gain no speed
PREFILL_CHUNK = 8192


def greedy_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[str]:
    """Greedy continuations of `prompts`, which must be of one length, without special tokens.

    The prompt is read in chunks, so memory grows with its KV cache alone. The generation config that comes with a model
    is not used: sampling and repetition penalties would be measured along with the model.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        prompts: token ids, all of one length.
        max_new_tokens: tokens to generate at most.
        prefill_chunk: tokens of a prompt read at once.
    """
    subject = Subject(model)
    ids = torch.tensor([list(p) for p in prompts], device=subject.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        prefill_chunk_size=prefill_chunk if ids.shape[1] > prefill_chunk else None,
        eos_token_id=subject.core.generation_config.eos_token_id,
        pad_token_id=pad,
    )
    core: Any = subject.core
    with subject.evaluating():
        out = core.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
