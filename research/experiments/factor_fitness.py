"""How well a model under a rescaling finds numbers in books: the loss of answers' tokens, with teacher forcing.

As in LongRoPE2 (arXiv:2502.20082, its needle-driven perplexity) only the tokens of answers count, since most tokens of
a long text need no far context. What a model writes would be a finer aim, but counts of right answers move in steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from factor_space import Rescale
from keeping_questions import Asked, ids_of, keyed
from rope_patch import patch_model, unpatch_model
from rope_patch.eval.measures.subject import Subject


@dataclass(frozen=True)
class Book:
    """One text of a length, with questions about it and the token ids of their answers."""

    length: int
    asked: Asked
    answers: list[list[int]]


def token_rows(tokenizer: Any, texts: Iterable[str], length: int, count: int) -> list[list[int]]:
    """The first `length` tokens of each of the first `count` texts that have so many.

    Raises:
        ValueError: there are fewer such texts.
    """
    ids = (tokenizer(text[: 8 * length], add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
    rows = list(islice((row[:length] for row in ids if len(row) >= length), count))
    if len(rows) < count:
        raise ValueError(f"--text must have {count} texts of {length} tokens or more, and has {len(rows)}.")
    return rows


def books_with_questions(
    tokenizer: Any, rows: Sequence[Sequence[int]], lengths: Sequence[int], count: int, seed: int
) -> list[Book]:
    """`count` books of each length: in turn in raw text and, of instruct models, in the chat template.

    Args:
        tokenizer: of the model.
        rows: token ids of texts, each as long as the longest book.
        lengths: of a book with its question and answer, in tokens.
        count: of each length.
        seed: of keys, numbers, their places and the parts of texts.
    """
    forms = (False, True) if tokenizer.chat_template else (False,)
    books = []
    for k, length in enumerate(lengths):
        first = k * count % len(rows)  # other texts for each length, as far as there are enough
        in_turn = [*rows[first:], *rows[:first]]
        by_form = [keyed("keys", tokenizer, in_turn, length, count, chat, seed) for chat in forms]
        for n in range(count):
            asked = by_form[(n + k) % len(forms)][n]
            books.append(Book(length, asked, [ids_of(tokenizer, f" {answer}") for answer in asked.answers]))
    return books


def fitness(model: nn.Module, books: Sequence[Book], rescale: Rescale | None, weight: float) -> dict[str, Any]:
    """Losses of a model under a rescaling, which is taken off again.

    Args:
        model: a causal LM without a patch.
        books: with their questions.
        rescale: method and options of `patch_model`; None for the native model.
        weight: of the books' loss beside the answers'.

    Returns:
        fitness: the mean over lengths of `answers`, and of `text` times the weight; the lower the better.
        answers, text: mean loss of an answer's token and of a book's token, in nats, for each length in order.
    """
    if rescale is not None:
        patch_model(model, rescale[0], **rescale[1])
    try:
        subject = Subject(model)
        with subject.evaluating():
            losses = [(book.length, *book_losses(subject, book)) for book in books]
    finally:
        unpatch_model(model)
    lengths = dict.fromkeys(book.length for book in books)
    answers = [fmean(x for n, of_answers, _ in losses if n == length for x in of_answers) for length in lengths]
    text = [fmean(of_text for n, _, of_text in losses if n == length) for length in lengths]
    return {"fitness": fmean(answers) + weight * fmean(text), "answers": answers, "text": text}


def book_losses(subject: Subject, book: Book) -> tuple[list[float], float]:
    """Losses of all answers' tokens, and the mean loss of the book's, from one reading of the book."""
    device = subject.device
    shared = torch.tensor([book.asked.shared], device=device)
    cache = DynamicCache(config=subject.causal_lm.config)
    hidden = subject.hidden(shared, cache)
    of_text = subject.losses(hidden[:, :-1], shared[:, 1:]).mean().item()
    ends = [[*tail, *answer] for tail, answer in zip(book.asked.tails, book.answers, strict=True)]
    longest = max(map(len, ends))
    # padded behind, where a causal model's earlier tokens do not look
    padded = torch.tensor([[*end, *[0] * (longest - len(end))] for end in ends], device=device)
    cache.batch_repeat_interleave(len(ends))
    hidden = subject.hidden(padded, cache)
    losses = subject.losses(hidden[:, :-1], padded[:, 1:]).tolist()
    spans = zip(losses, book.asked.tails, book.answers, strict=True)
    return [x for row, tail, answer in spans for x in row[len(tail) - 1 :][: len(answer)]], of_text
