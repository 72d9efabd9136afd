"""Greedy answers to long prompts: read once where prompts begin alike, and decoded together."""

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

# queries read at once on a CPU, or by a model's own `generate`: a longer chunk gains no speed
PREFILL_CHUNK = 8192
_ROWS = 4  # prompts in a batch of a model's own `generate`

Done = Callable[[int], None]


def greedy_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **options: Any,
) -> list[str]:
    """The most likely continuation of each of `prompts`, token by token, without special tokens.

    Each answer is that of `model.generate(do_sample=False)` to its prompt alone. Prompts that begin alike are read once
    up to where they part: give all that are asked about one text in one call. Memory grows with keys and values of the
    prompts that are held at once. A model whose forward needs more than plain tokens, positions and causal or sliding
    attention, and one that is called under a RoPE view, is asked by its own `generate` instead; under a view, and where
    RoPE frequencies go by the length of the prompt, it reads every prompt in one piece.

    The generation config that comes with a model is not used, except for the tokens that end an answer: sampling and
    repetition penalties would be measured along with the model.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        prompts: token ids, of one length or of several.
        max_new_tokens: tokens to generate at most.
        **options: batch_size, prefill_chunk and done, as `ask_greedily` takes them.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    replies = greedy_tokens(model, prompts, pad_token=pad, max_new_tokens=max_new_tokens, **options)
    return tokenizer.batch_decode(replies, skip_special_tokens=True)


def greedy_tokens(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, pad_token: int | None, max_new_tokens: int, **options: Any
) -> list[list[int]]:
    """What `greedy_answers` decodes: the new tokens of each prompt, the one that ends it included."""
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
    """What `greedy_tokens` gives, and beside it the model's choices at each token of the right answers.

    Both come from one reading of a prompt; a model that is asked by its own `generate` reads it once more for them.

    Args:
        model: a causal LM.
        questions: prompts, how long each reply may be, and right answers.
        pad_token: may stand behind the end of an answer that a model's own `generate` made in a batch.
        batch_size: prompts held and decoded at once, at most; None means as many as free memory holds.
        prefill_chunk: tokens of a prompt read at once; None means by free memory on a GPU, else 8192.
        done: called with the number of prompts that have been read, as they are.
    """
    subject = InferenceModel(model)
    with subject.evaluating():
        kv_bytes = bytes_per_token(subject.causal_lm)
        if kv_bytes is None:
            return _generated(subject, pad_token, questions, batch_size, prefill_chunk, done)
        return Reader(subject.causal_lm, kv_bytes, batch_size, prefill_chunk).replies(questions, done)


def times_read(model: nn.Module) -> int:
    """How often `ask_greedily` has the model read a prompt with a right answer."""
    subject = InferenceModel(model)
    with subject.evaluating():
        return 2 if bytes_per_token(subject.causal_lm) is None else 1


def _forced(subject: InferenceModel, question: Question) -> list[int]:
    """The model's choice at each token of the right answer, by one forward over prompt and answer."""
    n = len(question.answer)
    if not n:
        return []
    ids = torch.tensor([[*question.prompt, *question.answer[:-1]]], device=subject.device)
    choices: list[int] = subject.log_probabilities(subject.hidden(ids)[0, -n:]).argmax(-1).tolist()
    return choices


# by the attention that runs and what autocast multiplies in; a model's structure decides, which is checked once: -1 for
# one that has to be asked by its own `generate`
_checked: "WeakKeyDictionary[nn.Module, dict[tuple[str, torch.dtype | None], int]]" = WeakKeyDictionary()


def bytes_per_token(causal_lm: Any) -> int | None:
    """Bytes of keys and values of a token, None for a model that `KVRows` cannot read as it is now."""
    if has_view(find_decoder(causal_lm)):
        return None
    if attention_kernel(causal_lm) != "sdpa" or "generate" in vars(causal_lm):
        return None
    if type(causal_lm).generate is not GenerationMixin.generate or causal_lm.config.is_encoder_decoder:
        return None
    if _reads_whole_prompts(causal_lm):
        return None
    layer_types = getattr(causal_lm.config.get_text_config(decoder=True), "layer_types", None) or ()
    if not set(layer_types) <= {"full_attention", "sliding_attention"}:
        return None
    if "logits_to_keep" not in inspect.signature(causal_lm.forward).parameters:
        return None
    known = _checked.setdefault(causal_lm, {})
    run = attention_name(causal_lm), multiplied_dtype(causal_lm.get_input_embeddings().weight.device)
    if run not in known:
        known[run] = bytes_if_alike(causal_lm)
    return known[run] if known[run] > 0 else None


def _reads_whole_prompts(causal_lm: Any) -> bool:
    """Whether RoPE frequencies go by the longest position of a forward: parts of a prompt would get other ones."""
    return any(frequencies_go_by_row(rotary) for _, rotary in named_rotary_modules(causal_lm))


def _generated(
    subject: InferenceModel,
    pad_token: int | None,
    questions: Sequence[Question],
    batch_size: int | None,
    prefill_chunk: int | None,
    done: Done,
) -> list[Reply]:
    """Replies by the model's own `generate`, in batches of one length and one limit."""
    causal_lm: Any = subject.causal_lm
    eos = causal_lm.generation_config.eos_token_id
    # a view draws for a whole prompt and refuses parts of it
    in_parts = not has_view(find_decoder(causal_lm), training=False) and not _reads_whole_prompts(causal_lm)
    replies: list[Reply] = []
    rows = batch_size or _ROWS
    while len(replies) < len(questions):
        question = questions[len(replies)]
        next_ones = questions[len(replies) : len(replies) + rows]
        of_one = (len(question.prompt), question.max_new_tokens)
        differs = (k for k, q in enumerate(next_ones) if (len(q.prompt), q.max_new_tokens) != of_one)
        ids = torch.tensor([list(q.prompt) for q in next_ones[: next(differs, rows)]], device=subject.device)
        chunk = prefill_chunk or max(PREFILL_CHUNK // len(ids), 1)
        config = GenerationConfig(
            max_new_tokens=question.max_new_tokens,
            do_sample=False,
            prefill_chunk_size=chunk if in_parts and ids.shape[1] > chunk else None,
            eos_token_id=eos,
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
        forced = [_forced(subject, question) for question in next_ones[: len(ids)]]
        replies += [Reply(*both) for both in zip(written, forced, strict=True)]
        done(len(replies))
    return replies


@contextmanager
def bare_generation_config(causal_lm: Any) -> Iterator[None]:
    """No generation config of the model's own: `generate` takes from it all that its argument leaves open."""
    before = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = before
