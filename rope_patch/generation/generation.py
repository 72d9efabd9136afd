"""Greedy replies to long prompts: shared beginnings are read once, and prompts are decoded together."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase

from rope_kernels.common.autocast import multiplied_dtype

from ..families.attention_calls import attention_kernel, attention_name
from ..forward.state import has_view
from ..rope.rotary import find_decoder, forget_rows, frequencies_go_by_row, named_rotary_modules
from .inference import InferenceModel
from .reading import Question, Reader, Reply
from .rows_check import bytes_if_alike

# prompt tokens that one forward reads in the model's `generate`: longer chunks are no faster
PREFILL_CHUNK = 8192
_ROWS = 4  # prompts in a batch of the model's `generate`

Done = Callable[[int], None]


def greedy_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **options: Any,
) -> list[str]:
    """Greedy continuations of `prompts`, without special tokens.

    Each is what `model.generate(do_sample=False)` gives for the prompt alone. A beginning that prompts share is read
    once, so put all prompts about one text into one call. Memory grows with the keys and values of the prompts that are
    held at once.

    The model's `generate` runs instead under a RoPE view, and for a model whose forward needs more than tokens,
    positions, and causal or sliding attention. Under a view, and if RoPE frequencies depend on the sequence length, it
    reads each prompt in one piece.

    Of the model's generation config only the end tokens are used, because sampling and repetition penalties would be
    measured along with the model.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        prompts: token IDs, of one length or of several.
        max_new_tokens: most tokens to generate.
        **options: batch_size, prefill_chunk and done of `ask_greedily`.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    replies = greedy_tokens(model, prompts, pad_token=pad, max_new_tokens=max_new_tokens, **options)
    return tokenizer.batch_decode(replies, skip_special_tokens=True)


def greedy_tokens(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, pad_token: int | None, max_new_tokens: int, **options: Any
) -> list[list[int]]:
    """The new tokens that `greedy_answers` decodes, end tokens included."""
    questions = [Question(prompt, max_new_tokens) for prompt in prompts]
    return [reply.written for reply in ask_greedily(model, questions, pad_token=pad_token, **options)]


def ask_greedily(
    model: nn.Module,
    questions: Sequence[Question],
    *,
    pad_token: int | None,
    batch_size: int | None = None,
    prefill_chunk: int | None = None,
    done: Done = lambda _: None,
) -> list[Reply]:
    """The new tokens of `greedy_tokens`, and the model's choices at each token of the right answers.

    Both come from one reading of a prompt, except with the model's `generate`, which reads it again for the choices.

    Args:
        model: a causal LM.
        questions: prompts, how long each reply may be, and right answers.
        pad_token: fills a batch of the model's `generate` after replies that have ended.
        batch_size: most prompts that are held and decoded at once; None means as many as 8 GiB of keys and values, or
            fewer where memory is short.
        prefill_chunk: prompt tokens that one forward reads; None means 16384.
        done: called with the number of prompts that have been read.
    """
    subject = InferenceModel(model)
    with subject.evaluating():
        kv_bytes = bytes_per_token(subject.causal_lm)
        if kv_bytes is None:
            return _by_generate(subject, pad_token, questions, batch_size, prefill_chunk, done)
        return Reader(subject.causal_lm, kv_bytes, batch_size, prefill_chunk).replies(questions, done)


def times_read(model: nn.Module) -> int:
    """How often `ask_greedily` reads a prompt that has a right answer."""
    subject = InferenceModel(model)
    with subject.evaluating():
        return 2 if bytes_per_token(subject.causal_lm) is None else 1


# bytes per token of each model, by attention implementation and autocast's dtype; -1 for a model that only its own
# `generate` can run
_checked: "WeakKeyDictionary[nn.Module, dict[tuple[str, torch.dtype | None], int]]" = WeakKeyDictionary()


def bytes_per_token(causal_lm: Any) -> int | None:
    """Bytes of keys and values of a token; None if `KVRows` cannot read the model as it is now."""
    text_config = causal_lm.config.get_text_config(decoder=True)
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if (
        has_view(find_decoder(causal_lm))
        or attention_kernel(causal_lm) != "sdpa"
        # `generate` of the model's class or instance may do more
        or "generate" in vars(causal_lm)
        or type(causal_lm).generate is not GenerationMixin.generate
        or causal_lm.config.is_encoder_decoder
        or _frequencies_go_by_row(causal_lm)
        or not layer_types <= {"full_attention", "sliding_attention"}
        or "logits_to_keep" not in inspect.signature(causal_lm.forward).parameters
    ):
        return None
    checked = _checked.setdefault(causal_lm, {})
    key = attention_name(causal_lm), multiplied_dtype(causal_lm.get_input_embeddings().weight.device)
    if key not in checked:
        checked[key] = bytes_if_alike(causal_lm)
    return checked[key] if checked[key] > 0 else None


def _frequencies_go_by_row(causal_lm: Any) -> bool:
    """Whether RoPE frequencies depend on the longest position of a forward, so that chunks would get other ones."""
    return any(frequencies_go_by_row(rotary) for _, rotary in named_rotary_modules(causal_lm))


def _by_generate(
    subject: InferenceModel,
    pad_token: int | None,
    questions: Sequence[Question],
    batch_size: int | None,
    prefill_chunk: int | None,
    done: Done,
) -> list[Reply]:
    """Replies by the model's `generate`, in batches with one prompt length and one limit."""
    causal_lm: Any = subject.causal_lm
    # a view draws for a whole prompt and refuses parts of it
    in_parts = not has_view(find_decoder(causal_lm), training=False) and not _frequencies_go_by_row(causal_lm)
    replies: list[Reply] = []
    rows = batch_size or _ROWS
    while len(replies) < len(questions):
        first, batch = questions[len(replies)], []
        for question in questions[len(replies) : len(replies) + rows]:
            if (len(question.prompt), question.max_new_tokens) != (len(first.prompt), first.max_new_tokens):
                break
            batch.append(question)
        ids = torch.tensor([list(q.prompt) for q in batch], device=subject.device)  # [batch, n]
        chunk = prefill_chunk or max(PREFILL_CHUNK // len(ids), 1)
        config = GenerationConfig(
            max_new_tokens=first.max_new_tokens,
            do_sample=False,
            prefill_chunk_size=chunk if in_parts and ids.shape[1] > chunk else None,
            eos_token_id=causal_lm.generation_config.eos_token_id,
            pad_token_id=pad_token,
        )
        try:
            forget_rows(causal_lm)
            with bare_generation_config(causal_lm):
                out = causal_lm.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows = rows // 2
            continue
        written = out[:, ids.shape[1] :].tolist()
        forced = [_forced(subject, question) for question in batch]
        replies += [Reply(*both) for both in zip(written, forced, strict=True)]
        done(len(replies))
    return replies


def _forced(subject: InferenceModel, question: Question) -> list[int]:
    """The model's choice at each token of the right answer, by one forward over prompt and answer."""
    n = len(question.answer)
    if not n:
        return []
    ids = torch.tensor([[*question.prompt, *question.answer[:-1]]], device=subject.device)
    # [n, hidden]: the last token of the prompt and all but the last of the answer predict the answer
    choices: list[int] = subject.log_probabilities(subject.hidden(ids)[0, -n:]).argmax(-1).tolist()
    return choices


@contextmanager
def bare_generation_config(causal_lm: Any) -> Iterator[None]:
    """Remove the model's generation config: `generate` takes from it what its argument leaves open."""
    before = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = before
