"""Questions about far text, which every model is asked alike and answers as it writes.

Three tests. "passkey": Landmark Attention's five digits in its repeated filler. "keys": eight sentences with a key
and a number each in a book, of which each is asked in turn, so that eight prompts share one reading of the book.
"words": the same with a word of the language in place of the number. Each in raw text and in the chat template, in
several wordings; training rows (trl_ext.rows) have others.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

from result_parts import Parts
from rope_patch.generation.generation import greedy_answers
from rope_patch.prompts.asking import Frame
from rope_patch.prompts.wordings import PASSKEY_FILLER

Keyed = Literal["keys", "words"]
NEW_TOKENS = {"passkey": 10, "keys": 12, "words": 8}
KEYS = 8  # sentences in a book
TOKENS_HELD = 2**19  # in the caches of prompts that are answered together: three runs share a GPU's memory
TAIL = 64  # tokens kept for the question and the beginning of its answer, at most: all prompts of a length read alike
# needle, question, beginning of the answer
PASSKEY = [
    ("The pass key is {v}. Remember it. {v} is the pass key.", "What is the pass key?", "The pass key is"),
    ("The secret code is {v}. Keep it in mind, {v}.", "What is the secret code?", "The secret code is"),
    ("My locker number is {v}. Do not forget it: {v}.", "What is my locker number?", "Your locker number is"),
    ("The safe opens with {v}. I repeat, with {v}.", "Which number opens the safe?", "The safe opens with"),
]
_NUMBERS = [
    (
        "The special magic number for {k} is: {v}.",
        "What is the special magic number for {k} mentioned in the text above?",
        "The special magic number for {k} is:",
    ),
    (
        "The access code of {k} is {v}.",
        "Which access code does {k} have, as the text above says?",
        "The access code of {k} is",
    ),
]
_WORDS = [
    (
        "The favourite thing of {k} is the {v}.",
        "What is the favourite thing of {k}, according to the text above?",
        "The favourite thing of {k} is the",
    ),
    (
        "Behind the door of {k} stood a {v}.",
        "The text above says what stood behind the door of {k}. What was it?",
        "Behind the door of {k} stood a",
    ),
]
KEYED: dict[Keyed, list[tuple[str, str, str]]] = {"keys": _NUMBERS, "words": _WORDS}
_ADJECTIVES = "amber brave calm dusty eager faint gentle hollow ivory jolly keen lively mellow narrow olden".split()
_NOUNS = "anchor basket candle dragon engine feather garden hammer island jacket kettle ladder marble orchard".split()
# none is in the wordings, in a key, or part of another
_THINGS = (
    "table river window bottle mirror bridge carpet violin pencil tractor pillow helmet spoon barrel curtain saddle "
    "trumpet blanket compass shovel statue whistle cannon balloon"
).split()


@dataclass(frozen=True)
class Asked:
    """Questions that share their beginning.

    Args:
        shared: token ids that all begin with.
        tails: token ids that follow, one list a question.
        answers: of the questions.
        wording: which one.
    """

    shared: list[int]
    tails: list[list[int]]
    answers: list[str]
    wording: int


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def passkeys(tokenizer: Any, length: int, count: int, chat: bool, seed: int) -> list[Asked]:
    """`count` prompts of `length` tokens with their answers, wordings in turn, depths spread evenly."""
    frame, filler, questions = Frame.of(tokenizer, chat), ids_of(tokenizer, PASSKEY_FILLER), []
    turn = frame.turn or " "
    for n in range(count):
        rng = random.Random(f"passkey {seed} {length} {n}")
        wording = n % len(PASSKEY)
        needle, question, beginning = PASSKEY[wording]
        key = str(rng.randint(10000, 99999))
        needle_ids = ids_of(tokenizer, needle.format(v=key) + " ")
        tail = ids_of(tokenizer, f"\n{question}{turn}{beginning}")
        room = length - NEW_TOKENS["passkey"] - TAIL - len(frame.begin) - len(needle_ids)
        # between two rounds of the filler
        place = round((n + 0.5) / count * room / len(filler)) * len(filler)
        hay = filler * (room // len(filler) + 1)
        ids = [*frame.begin, *hay[:place], *needle_ids, *hay[place:room]]
        questions.append(Asked(ids, [tail], [key], wording))
    return questions


def keyed(
    test: Keyed, tokenizer: Any, books: Sequence[Sequence[int]], length: int, count: int, chat: bool, seed: int
) -> list[Asked]:
    """`count` books of `length` tokens with their questions, each with KEYS sentences in it."""
    frame, questions = Frame.of(tokenizer, chat), []
    turn = frame.turn or " "
    for n in range(count):
        rng = random.Random(f"{test} {seed} {length} {n}")
        wording = n % len(KEYED[test])
        needle, question, beginning = KEYED[test][wording]
        names = rng.sample([f"{a}-{b}" for a in _ADJECTIVES for b in _NOUNS], KEYS)
        values = rng.sample(_THINGS, KEYS) if test == "words" else _numbers(rng)
        needles = [ids_of(tokenizer, " " + needle.format(k=k, v=v)) for k, v in zip(names, values, strict=True)]
        tails = [ids_of(tokenizer, f"\n{question.format(k=k)}{turn}{beginning.format(k=k)}") for k in names]
        room = length - NEW_TOKENS[test] - TAIL - len(frame.begin) - sum(map(len, needles))
        book = books[n % len(books)]
        offset = rng.randrange(max(len(book) - room, 1))
        hay = list(book[offset : offset + room])
        assert len(hay) == room, f"a book has {len(book)} tokens, {room} are needed"
        ids, used = list(frame.begin), 0
        for k, piece in enumerate(needles):
            place = round((k + rng.random()) / KEYS * room)
            ids += hay[used:place] + piece
            used = place
        questions.append(Asked(ids + hay[used:], tails, values, wording))
    return questions


def _numbers(rng: random.Random) -> list[str]:
    return [str(v) for v in rng.sample(range(100_000, 1_000_000), KEYS)]


def right(questions: list[Asked], replies: list[str]) -> list[int]:
    """1 for each reply that has its answer in it."""
    answers = [answer for a in questions for answer in a.answers]
    return [int(answer in reply) for answer, reply in zip(answers, replies, strict=True)]


def raw_questions(
    tokenizer: Any, books: Sequence[Sequence[int]], lengths: Sequence[int], prompts: int, seed: int = 0
) -> dict[tuple[str, int], list[Asked]]:
    """At least so many passkeys and keyed numbers at each length, in raw text, by test and length."""
    questions: dict[tuple[str, int], list[Asked]] = {}
    for length in lengths:
        questions["passkey", length] = passkeys(tokenizer, length, prompts, False, seed)
        questions["keys", length] = keyed("keys", tokenizer, books, length, math.ceil(prompts / KEYS), False, seed)
    return questions


def all_answered(
    model: Any, tokenizer: Any, asked: Mapping[tuple[str, int], list[Asked]], parts: Parts
) -> list[dict[str, Any]]:
    """What a model wrote to the questions of each test and length, but for what `parts` has."""
    return [
        {
            "test": test,
            "length": length,
            **parts.get(f"{test} {length}", partial(answered, model, tokenizer, test, questions, length)),
        }
        for (test, length), questions in asked.items()
    ]


def answered(model: Any, tokenizer: Any, test: str, questions: list[Asked], length: int) -> dict[str, Any]:
    """What a model wrote to the questions of one test and length: score and wording of each, and a few texts."""
    since = time.perf_counter()
    prompts = [a.shared + tail for a in questions for tail in a.tails]
    at_once = max(TOKENS_HELD // length, 1)
    said = greedy_answers(model, tokenizer, prompts, max_new_tokens=NEW_TOKENS[test], batch_size=at_once)
    scores = right(questions, said)
    seconds = time.perf_counter() - since
    print(f"{test} at {length}: {fmean(scores):.2f} in {seconds:.0f} s", flush=True)
    return {
        "scores": scores,
        "wordings": [a.wording for a in questions for _ in a.answers],
        "seconds": seconds,
        "shown": list(zip([answer for a in questions for answer in a.answers], said, strict=True))[:3],
    }
