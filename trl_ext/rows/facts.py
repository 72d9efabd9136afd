"""Made-up facts: drawn names with drawn values."""

import random
from dataclasses import dataclass

from .wordings import FACT_WORDINGS, FactWording, ValueKind

SYLLABLES = "ba cor del fin gra hol jun kas lem mor nor pel qui ras sol tur ven wil yor zan".split()
_LETTERS = "BCDFGHJKLMNPRSTVWXZ"  # without vowels: no words


@dataclass(frozen=True)
class Question:
    """A question and its answer.

    Args:
        question: what is asked.
        lead: how the reply begins, up to the answer, without a space at its end.
        answer: the rest of the reply, with the space before it.
    """

    question: str
    lead: str
    answer: str

    @classmethod
    def of(cls, question: str, reply: str, answer: str, **names: str) -> "Question":
        """A question in one wording, with `{answer}` in its reply and the placeholders `names`."""
        lead, rest = reply.split("{answer}")
        return cls(question.format(**names), lead.format(**names).rstrip(" "), f" {answer}{rest}")


@dataclass(frozen=True)
class Fact(Question):
    """A question about one sentence, which is hidden in a text."""

    sentence: str

    @classmethod
    def in_words(cls, wording: FactWording, name: str, value: str) -> "Fact":
        """A fact in one wording: its sentence, and its question with the answer."""
        asked = Question.of(wording.question, wording.reply.replace("{value}", "{answer}"), value, name=name)
        return cls(**vars(asked), sentence=wording.fact.format(name=name, value=value))


def draw_facts(n: int, rng: random.Random) -> list[Fact]:
    """`n` facts in one wording, with different names and values: only the name identifies the one that is asked."""
    wording = rng.choice(FACT_WORDINGS)
    names: list[str] = []
    values: list[str] = []
    while len(names) < n:
        name, value = draw_name(rng), draw_value(wording.value, rng)
        if name not in (*names, *values) and value not in (*names, *values, name):  # some values are words too
            names.append(name)
            values.append(value)
    return [Fact.in_words(wording, name, value) for name, value in zip(names, values, strict=True)]


def draw_name(rng: random.Random) -> str:
    """A made-up name."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3)))).capitalize()


def draw_value(kind: ValueKind, rng: random.Random) -> str:
    """A made-up value."""
    if kind == "number":
        return str(rng.randrange(10 ** rng.choice((2, 3, 4, 5)), 10**6))  # three to six digits
    if kind == "year":
        return str(rng.randrange(1200, 2000))
    if kind == "code":
        return f"{rng.choice(_LETTERS)}{rng.choice(_LETTERS)}{rng.randrange(10, 10_000)}"
    if kind == "time":
        return f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return draw_name(rng)
