"""Sampled continuations of prompts, all at once in `KVRows` or by the model's `generate`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .decoding import Decoder, Sampling, up_to_end
from .generation import bare_generation_config, bytes_per_token
from .inference import InferenceModel
from .kv_rows import KVRows

_TOGETHER = 8192  # prompt tokens that one forward reads


def sampled_tokens(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    temperature: float,
    seed: int,
    pad_token: int,
    step_done: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Continue each of `prompts` with tokens drawn from softmax(logits / temperature).

    All prompts are held and decoded at once, so memory grows with the keys and values of all of them. On one machine,
    the same seed and prompts give the same tokens. Torch's global generators do not change. If `KVRows` cannot read the
    model, its `generate` runs.

    Args:
        model: a causal LM.
        prompts: token IDs, at least one each, of one length or of several.
        max_new_tokens: most new tokens, at least 1.
        ends: end tokens.
        temperature: above 0.
        seed: of the draws.
        pad_token: for `generate`, fills shorter prompts on the left.
        step_done: called after each new token of all texts.

    Returns:
        The new tokens of each prompt, up to the first end token, which is included.
    """
    subject = InferenceModel(model)
    with subject.evaluating():
        if bytes_per_token(subject.causal_lm) is None:
            config = GenerationConfig(
                max_new_tokens=max_new_tokens,
                do_sample=True,
                temperature=float(temperature),
                top_k=0,
                top_p=1.0,
                eos_token_id=list(ends),
                pad_token_id=pad_token,
            )
            replies = _by_generate(subject, prompts, config, seed, _EachStep(step_done))
            return [up_to_end(reply, ends) for reply in replies]
        lengths = [len(p) for p in prompts]
        rows = KVRows(subject.causal_lm, len(prompts), max(lengths) + max_new_tokens)
        with rows.attention():
            logits = _logits_behind(rows, prompts, subject.device)
            if bool(logits.isnan().any()):  # argmax would choose one token again and again; `generate` raises
                raise ValueError("the logits of the model are nan: its weights or activations are not finite.")
            decoder = Decoder(rows, Sampling(temperature, seed, logits))
            return decoder.decode(logits, lengths, [max_new_tokens] * len(prompts), ends, step_done)


def _logits_behind(rows: KVRows, prompts: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Fill `rows` with prompts and return the logits after each, [rows, vocab_size]."""
    ids, first = [torch.tensor(p, device=device) for p in prompts], 0
    padded = pad_sequence([p[:-1] for p in ids], batch_first=True)  # `end` reads the last tokens
    if width := padded.shape[1]:
        for part in padded.split(max(_TOGETHER // width, 1)):
            rows.read(part, first, 0, chunk=width)
            first += len(part)
    return rows.end(ids)


def _by_generate(
    subject: InferenceModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seed: int,
    each_step: "_EachStep",
) -> list[list[int]]:
    """New tokens by the model's `generate`, in one batch; tokens after the end token may be anything."""
    causal_lm, device, longest = subject.causal_lm, subject.device, max(map(len, prompts))
    ids = torch.tensor([[config.pad_token_id] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), bare_generation_config(causal_lm):
        torch.manual_seed(seed)
        out = causal_lm.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([each_step]),
        )
    new: list[list[int]] = out[:, longest:].tolist()
    return new


class _EachStep(StoppingCriteria):
    """Calls `step_done` after each token; it never stops the generation."""

    def __init__(self, step_done: Callable[[], object]) -> None:
        self.step_done = step_done

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.step_done()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
