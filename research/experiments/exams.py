"""Retrieval with many questions on one text, answered in one forward: training material and a measure.

An exam is text with sentences in it, "The special magic number for amber-anchor-17 is: 1234567.", and questions behind
them, each with its answer. "multikey": every sentence has a key of its own, all look-alikes. "ordinal": three keys of
six sentences each, of which the first, second, ... or last is asked. Answers are graded under teacher forcing: all of
an answer's tokens are the most probable, which is when greedy decoding would have given it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from rope_patch.eval.measures.subject import Subject
from rope_patch.prompts.needles import make_prompt

Kind = Literal["multikey", "ordinal"]
KINDS: tuple[Kind, ...] = ("multikey", "ordinal")
Needle = Literal["passkey", "multikey"]
NEEDLES: tuple[Needle, ...] = ("passkey", "multikey")
ANSWER_ROOM = 8  # tokens: a space and seven digits

_ADJECTIVES = "amber brave calm dusty eager faint gentle hollow ivory jolly keen lively".split()
_NOUNS = "anchor basket candle dragon engine feather garden hammer island jacket kettle ladder".split()
_KEYS = [f"{adjective}-{noun}-{n}" for adjective in _ADJECTIVES for noun in _NOUNS for n in range(10, 100)]
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "last")
_ORDINAL_KEYS = 3


@dataclass(frozen=True)
class Exam:
    """A row of tokens.

    Args:
        ids: of text, sentences, questions and answers.
        answers: of each question (first, end), the places of its answer's tokens in `ids`.
        depths: of each question, where its sentence is, from 0, the start of the row, to 1.
        n_text: tokens of the text that it was hidden in, 0 where nothing is to go on behind it.
    """

    ids: list[int]
    answers: list[tuple[int, int]]
    depths: list[float]
    n_text: int = 0

    @property
    def answered(self) -> list[int]:
        """1 for each token of an answer, 0 for others."""
        inside = {i for first, end in self.answers for i in range(first, end)}
        return [int(i in inside) for i in range(len(self.ids))]


def make_exam(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[int],
    length: int,
    spacing: int,
    rng: random.Random,
    questions: int = 8,
    begin: Sequence[int] = (),
) -> Exam:
    """An exam of exactly `length` tokens.

    Args:
        kind: "multikey", sentences with a key of their own each, or "ordinal", which repeat a few keys.
        tokenizer: of the model.
        text: tokens to hide sentences in, at least `length`, or so many that `begin` makes it that.
        length: tokens of the row, questions and answers included.
        spacing: tokens from one sentence of "multikey" to the next, its own included.
        rng: draws keys, values, places and questions.
        questions: that are asked, or one of each sentence if there are fewer.
        begin: tokens before all text, as the tokenizer begins one.

    Raises:
        ValueError: sentences and questions need more than `length` tokens.
    """
    facts = _look_alikes(length // spacing, rng) if kind == "multikey" else _repeated(rng)
    chosen = rng.sample(range(len(facts)), min(questions, len(facts)))
    words = [f" The special magic number for {key} is: {value}." for key, value in facts]
    for i in chosen:
        key, value = facts[i]
        earlier = sum(other == key for other, _ in facts[:i])
        which = "the" if kind == "multikey" else f"the {_ORDINALS[earlier]}"
        words.append(f"\nWhat is {which} special magic number for {key} mentioned in the text above? It is:")
        words.append(f" {value}.")
    tokens = tokenizer(words, add_special_tokens=False)["input_ids"]
    sentences, dialogue = tokens[: len(facts)], tokens[len(facts) :]
    n_text = length - len(begin) - sum(map(len, sentences)) - sum(map(len, dialogue))
    if n_text < 0:
        raise ValueError(f"sentences and questions need {-n_text} tokens more than length={length}: use more spacing.")
    ids = [*begin]
    begins = []
    used = 0
    for place, sentence in zip(sorted(rng.randint(0, n_text) for _ in sentences), sentences, strict=True):
        ids += [*text[used:place]]
        begins.append(len(ids))
        ids += sentence
        used = place
    ids += [*text[used:n_text]]
    answers = []
    for question, answer in zip(dialogue[::2], dialogue[1::2], strict=True):
        ids += question
        answers.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return Exam(ids, answers, [begins[i] / length for i in chosen], n_text)


def exam_over(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[int],
    keys: int,
    rng: random.Random,
    questions: int,
    begin: Sequence[int] = (),
) -> Exam:
    """An exam as long as `begin` and `text`, with `keys` look-alikes or repeated keys anywhere in the text."""
    length = len(begin) + len(text)
    return make_exam(kind, tokenizer, text, length, length // keys, rng, questions, begin)


def sitting(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    haystack: Sequence[int],
    length: int,
    n_exams: int,
    keys: int,
    questions: int,
    begin: Sequence[int] = (),
) -> list[Exam]:
    """The exams of a kind and length that all models sit, in texts from anywhere in `haystack`, behind `begin`."""
    rng = random.Random(7)
    room = length - len(begin)
    places = [rng.randrange(len(haystack) - room + 1) for _ in range(n_exams)]
    texts = (haystack[place : place + room] for place in places)
    return [exam_over(kind, tokenizer, text, keys, rng, questions, begin) for text in texts]


def needle_exam(
    kind: Needle,
    tokenizer: PreTrainedTokenizerBase,
    haystack: Sequence[int],
    length: int,
    depth: float,
    rng: random.Random,
) -> Exam:
    """A retrieval prompt of `rope_patch.eval` with its answer behind it, whose digits are graded teacher-forced.

    A model that would rather begin its answer otherwise ("The pass key is a ...") shows so whether it finds the number.

    Args:
        kind: "passkey", or "multikey" with four needles.
        tokenizer: of the model.
        haystack: tokens to hide needles in, at least `length`.
        length: tokens of prompt and answer together, less the few that the answer may fall short of its room.
        depth: place of the needle that is asked for, from 0, the start, to 1, right before the question.
        rng: draws keys and numbers.
    """
    n_needles = 1 if kind == "passkey" else 4
    n_tokens = length - ANSWER_ROOM
    prompt = make_prompt(kind, tokenizer, haystack, n_tokens=n_tokens, depth=depth, n_needles=n_needles, rng=rng)
    answer = tokenizer(f" {prompt.answers[0]}", add_special_tokens=False)["input_ids"]
    first = next(i for i, token in enumerate(answer) if any(c.isdigit() for c in tokenizer.decode([token])))
    ids = [*prompt.ids, *answer]
    return Exam(ids, [(n_tokens + first, len(ids))], [prompt.position / len(ids)])


@torch.no_grad()
def predicted(model: Any, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The most probable token at each of `places` [k] given all before it in `ids` [n]; layers with a window get no
    mask of n x n.
    """
    subject = Subject(model)
    states = subject.hidden(ids[None])[0, places - 1]
    return subject.log_probabilities(states).argmax(-1)


def accuracy(model: Any, exam: Exam) -> list[tuple[float, bool]]:
    """(depth, whether the answer is right) of each question.

    Raises:
        ValueError: the model is in training mode, in which a view would be sampled.
    """
    if model.training:
        raise ValueError("exams are graded in evaluation mode: call model.eval() first.")
    ids = torch.tensor(exam.ids, device=model.device)
    places = torch.tensor([i for first, end in exam.answers for i in range(first, end)], device=model.device)
    hits = (predicted(model, ids, places) == ids[places]).cpu().split([end - first for first, end in exam.answers])
    return [(depth, bool(of_answer.all())) for depth, of_answer in zip(exam.depths, hits, strict=True)]


def marks(model: Any, sat: Sequence[Exam]) -> list[list[tuple[float, bool]]]:
    """Of each exam the depth of each answer, to three digits, and whether it is right."""
    return [[(round(depth, 3), right) for depth, right in accuracy(model, exam)] for exam in sat]


def _look_alikes(n: int, rng: random.Random) -> list[tuple[str, str]]:
    """N different keys, which share their words with many others, with a value each."""
    return list(zip(rng.sample(_KEYS, n), _values(n, rng), strict=True))


def _repeated(rng: random.Random) -> list[tuple[str, str]]:
    """A few keys, each as often as there are ordinals, in turns that are drawn."""
    keys = [key for key, _ in _look_alikes(_ORDINAL_KEYS, rng) for _ in _ORDINALS]
    rng.shuffle(keys)
    return list(zip(keys, _values(len(keys), rng), strict=True))


def _values(n: int, rng: random.Random) -> list[str]:
    return [str(value) for value in rng.sample(range(1_000_000, 10_000_000), n)]
