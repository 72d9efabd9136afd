"""A row for programs that serve models: a held-out book with passkeys in it, and questions about them at its end."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rope_patch.prompts.needles import ends_sentence
from rope_patch.prompts.wordings import PASSKEY_WORDINGS

_SEARCHED = 64  # tokens before a place in which the end of a sentence is looked for


@dataclass(frozen=True)
class Row:
    """A row of tokens.

    Args:
        ids: of the book, the sentences in it, the questions and the answers.
        answers: of each question (first, end), the places of its number's tokens in `ids`.
        n_text: tokens of the book and the sentences, before the first question.
        questions: token ids of each, up to its number.
    """

    ids: list[int]
    answers: list[tuple[int, int]]
    n_text: int
    questions: list[list[int]]


def passkey_row(tokenizer: PreTrainedTokenizerBase, book: Sequence[int], length: int, seed: int = 0) -> Row:
    """A row of exactly `length` tokens with a passkey in each of the wordings of `rope_patch.eval`, and their answers.

    The sentences are spread evenly, each behind a sentence of the book, and asked for in another order.

    Args:
        tokenizer: of the model.
        book: token ids, at least `length`.
        length: tokens of the row.
        seed: draws the numbers and the order of the questions.

    Raises:
        ValueError: the book is too short.
    """
    if len(book) < length:
        raise ValueError(f"a row of {length} tokens needs as many of a book, got {len(book)}.")
    rng = random.Random(seed)
    keys = [str(key) for key in rng.sample(range(10_000, 100_000), len(PASSKEY_WORDINGS))]
    told = list(zip(PASSKEY_WORDINGS, keys, strict=True))
    sentences = [_tokens(tokenizer, f" {wording.needle.format(key=key)}") for wording, key in told]
    dialogue = []
    for wording, key in rng.sample(told, len(told)):
        dialogue += [_tokens(tokenizer, f"{wording.question} {wording.beginning}"), _tokens(tokenizer, f" {key}")]
    n_book = length - sum(map(len, sentences + dialogue))
    ids: list[int] = []
    used = 0
    for number, sentence in enumerate(sentences):
        place = _sentence_end(tokenizer, book, round((number + 0.5) / len(sentences) * n_book))
        ids += [*book[used:place], *sentence]
        used = place
    ids += book[used:n_book]
    n_text = len(ids)
    answers = []
    for question, answer in zip(dialogue[::2], dialogue[1::2], strict=True):
        ids += question
        digits = [i for i, token in enumerate(answer) if any(c.isdigit() for c in str(tokenizer.decode([token])))]
        answers.append((len(ids) + digits[0], len(ids) + len(answer)))
        ids += answer
    return Row(ids, answers, n_text, dialogue[::2])


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _sentence_end(tokenizer: PreTrainedTokenizerBase, book: Sequence[int], place: int) -> int:
    ends = (end for end in range(place, place - _SEARCHED, -1) if ends_sentence(tokenizer, book[end - 1]))
    return next(ends, place)
