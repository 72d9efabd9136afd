"""Sample texts from a model, to train it on later so that it keeps its own wording."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from rope_patch.base.validators import require_number
from rope_patch.forward.state import has_view
from rope_patch.generation.decoding import end_tokens, first_end
from rope_patch.generation.inference import InferenceModel
from rope_patch.generation.sampling import sampled_tokens
from rope_patch.layout.special_tokens import SpecialTokens
from rope_patch.rope.rotary import find_decoder

from .turns import SampledTurns

# fixed and not by free memory, so that a seed gives the same texts each time. On a GPU a step of a small model mostly
# reads weights and launches kernels, which more rows share; a CPU is busy with few
AT_ONCE = {"cuda": 1024, "cpu": 8}
"""Texts that are written at once, by device."""

_FRUITLESS = 10  # batches without a text after which sampling stops with an error


def own_chats(
    model: nn.Module,
    tokenizer: Any,
    n: int,
    *,
    max_user_tokens: int = 96,
    max_reply_tokens: int = 512,
    temperature: float = 1.0,
    seed: int = 0,
    keep_unfinished: bool = False,
    batch_size: int | None = None,
    progress: bool = True,
) -> list[list[int]]:
    """`n` chats of which the model writes both turns, each the token ids of the whole chat.

    The model is given its chat template up to where a user's text begins and goes on until it ends that text; then it
    is given the template up to the reply. Both are sampled from the whole vocabulary. A user's text that is blank, has
    special tokens in it or does not end within `max_user_tokens` is left out, and so is such a reply. A batch is
    written to its end before any text of it is taken: the first texts to end would be short ones.

    The same seed and batch size give the same chats on the same machine, whatever else draws random numbers.

    Args:
        model: a causal LM, native or patched, not under a view. Its mode is restored.
        tokenizer: of the model, with a chat template.
        n: chats.
        max_user_tokens: tokens of a user's text at most.
        max_reply_tokens: tokens of a reply at most.
        temperature: of both turns, above 0.
        seed: of what is sampled.
        keep_unfinished: whether replies that do not end are kept, cut at `max_reply_tokens`.
        batch_size: chats sampled at once; None means 1024 on a GPU and 8 on a CPU, half of it each time memory runs
            out.
        progress: whether a bar is shown.

    Raises:
        ValueError: a temperature of 0; a tokenizer without a chat template, or with one that ends a user's text with
            no special token; more tokens than the trained window; a view in force; or a model that writes no chats.

    Source: Magpie, arXiv:2406.08464, section 2.1.
    """
    chats = sampled_chats(
        model,
        tokenizer,
        max_user_tokens=max_user_tokens,
        max_reply_tokens=max_reply_tokens,
        temperature=temperature,
        seed=seed,
        keep_unfinished=keep_unfinished,
        batch_size=batch_size,
        progress=progress,
    )
    return _first(chats, n, "chats of the model", progress)


def own_texts(
    model: nn.Module,
    tokenizer: Any,
    n: int,
    *,
    max_tokens: int = 1024,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
) -> list[list[int]]:
    """`n` texts that a model writes from the tokens that begin any text: for base models, in place of `own_chats`.

    A text ends with an end-of-sequence token or at `max_tokens`. Blank ones are left out.

    Args:
        model: a causal LM, native or patched, not under a view. Its mode is restored.
        tokenizer: of the model.
        n: texts.
        max_tokens: tokens of a text at most.
        temperature: above 0.
        seed: of what is sampled.
        batch_size: texts sampled at once; None means 1024 on a GPU and 8 on a CPU, half of it each time memory runs
            out.
        progress: whether a bar is shown.

    Raises:
        ValueError: a temperature of 0; a tokenizer that has neither a beginning- nor an end-of-sequence token; more
            tokens than the trained window; a view in force; or a model that writes nothing.
    """
    texts = sampled_texts(
        model,
        tokenizer,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    return _first(texts, n, "texts of the model", progress)


def sampled_chats(
    model: nn.Module,
    tokenizer: Any,
    *,
    max_user_tokens: int = 96,
    max_reply_tokens: int = 512,
    temperature: float = 1.0,
    seed: int = 0,
    keep_unfinished: bool = False,
    batch_size: int | None = None,
    progress: bool = True,
) -> Iterator[list[int]]:
    """The chats of `own_chats` without end."""
    sampler = _Sampler(model, tokenizer, temperature, seed, batch_size, progress)
    turns = SampledTurns.of(tokenizer, sampler.ends)
    sampler.require_room(len(turns.begin) + max_user_tokens + len(turns.turn) + max_reply_tokens)
    special = set(tokenizer.all_special_ids)

    def questions(rows: int) -> list[list[int]]:
        ends = (turns.end_of_user, *sampler.ends)
        asked = []
        for ids in sampler.sample([list(turns.begin)] * rows, max_user_tokens, ends, "user's turns"):
            end = first_end(ids, ends)
            # an end of the whole text is no end of a turn
            if end is None or ids[end] != turns.end_of_user or special & set(ids[:end]):
                continue
            if _has_text(tokenizer, ids[:end]):
                asked.append([*turns.begin, *ids[:end], *turns.turn])
        return asked

    def replies(rows: int) -> list[list[int]]:
        while len(waiting) < rows:
            waiting.append(next(asked))  # users' texts, until there are as many as replies are written at once
        prompts = waiting[:rows]
        replies = sampler.sample(prompts, max_reply_tokens, turns.ends_of_reply, "replies")
        del waiting[:rows]  # only now, as memory may run out above
        chats = []
        for prompt, ids in zip(prompts, replies, strict=True):
            end = first_end(ids, turns.ends_of_reply)
            if (end is None and not keep_unfinished) or special & set(ids[:end]):
                continue
            if _has_text(tokenizer, ids[:end]):
                chats.append(prompt + ids)
        return chats

    remedy = "allow more, or leave chats out"
    asked = sampler.batches(questions, f"no user's text that ends within {max_user_tokens} tokens: {remedy}")
    waiting: list[list[int]] = []
    return sampler.batches(replies, f"no reply that ends within {max_reply_tokens} tokens: {remedy}")


def sampled_texts(
    model: nn.Module,
    tokenizer: Any,
    *,
    max_tokens: int = 1024,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
) -> Iterator[list[int]]:
    """The texts of `own_texts` without end."""
    sampler = _Sampler(model, tokenizer, temperature, seed, batch_size, progress)
    begin = (
        list(SpecialTokens.of(tokenizer).begin)
        # an end-of-sequence token stands between texts in pretraining
        or [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None][:1]
    )
    if not begin:
        raise ValueError(
            "own_texts needs a token that texts begin with, and the tokenizer has neither a beginning- nor an "
            "end-of-sequence token: leave own_texts out."
        )
    sampler.require_room(len(begin) + max_tokens)

    def batch(rows: int) -> list[list[int]]:
        texts = []
        for ids in sampler.sample([begin] * rows, max_tokens, sampler.ends, "texts"):
            end = first_end(ids, sampler.ends)
            if _has_text(tokenizer, ids[:end]):
                texts.append(begin + ids)
        return texts

    return sampler.batches(batch, "nothing but blank texts: leave own_texts out")


class _Sampler:
    """Batches of sampled tokens, each with draws of its own number."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, temperature: float, seed: int, batch_size: int | None, progress: bool
    ) -> None:
        require_number("temperature", temperature)
        self.subject = InferenceModel(model)
        self.causal_lm = self.subject.causal_lm
        if has_view(find_decoder(self.causal_lm), training=False):
            raise ValueError(
                "a view of the RoPE indices is in force on the model and would change what it writes: sample outside "
                "rope_view, before a view is set for evaluation."
            )
        ends = (*end_tokens(self.causal_lm), tokenizer.eos_token_id)
        self.ends = tuple(dict.fromkeys(i for i in ends if i is not None))
        # masked wherever it stands, so any token will do
        self.pad = next((i for i in (tokenizer.pad_token_id, *self.ends) if i is not None), 0)
        self.temperature, self.seed, self.progress = temperature, seed, progress
        device = self.subject.device.type
        self.rows = AT_ONCE.get(device, AT_ONCE["cuda"]) if batch_size is None else batch_size
        self.calls = 0

    def require_room(self, tokens: int) -> None:
        window = self.subject.trained_window
        if window is not None and tokens > window:
            raise ValueError(
                f"what is sampled must fit into the trained window of {window} tokens, got {tokens} with what the "
                "template adds: allow fewer tokens."
            )

    def batches(self, batch: Callable[[int], list[list[int]]], nothing: str) -> Iterator[list[int]]:
        """Texts of one batch after another; batches are halved when memory runs out."""
        fruitless = 0
        while True:
            try:
                rows = batch(self.rows)
            except torch.OutOfMemoryError:
                if self.rows == 1:
                    raise
                self.rows //= 2
                continue
            fruitless = 0 if rows else fruitless + 1
            if fruitless == _FRUITLESS:
                raise ValueError(f"in {_FRUITLESS} batches of {self.rows} the model wrote {nothing}.")
            yield from rows

    def sample(self, prompts: list[list[int]], n_tokens: int, ends: tuple[int, ...], what: str) -> list[list[int]]:
        """What the model writes behind each of `prompts`, at most `n_tokens`, up to one of `ends`."""
        call = self.calls + 1
        title = f"{len(prompts)} {what}, at most"
        with tqdm(total=n_tokens, desc=title, unit="token", leave=False, disable=not self.progress) as bar:
            written = sampled_tokens(
                self.subject.model,
                prompts,
                max_new_tokens=n_tokens,
                ends=ends,
                temperature=self.temperature,
                seed=((self.seed << 24) + call) % 2**63,  # different for each call of each seed
                pad_token=self.pad,
                step_done=bar.update,
            )
        self.calls = call  # only now: after running out of memory, a smaller batch begins with the same draws
        return written


def until(tokens: int, texts: Iterator[list[int]], what: str) -> list[list[int]]:
    """As many texts as hold `tokens` tokens together, with a progress bar named `what`."""
    taken: list[list[int]] = []
    with tqdm(total=tokens, desc=what, unit="token", unit_scale=True) as bar:
        while bar.n < tokens:
            taken.append(next(texts))
            bar.update(min(len(taken[-1]), tokens - bar.n))
    return taken


def _has_text(tokenizer: Any, ids: list[int]) -> bool:
    return bool(str(tokenizer.decode(ids, skip_special_tokens=True)).strip())


def _first(rows: Iterator[list[int]], n: int, what: str, progress: bool) -> list[list[int]]:
    return list(tqdm(islice(rows, n), total=n, desc=what, unit="text", disable=not progress))
