"""Rows of text with hidden sentences, and questions about them at the end whose answers are labelled."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

from rope_patch.prompts.needles import ends_sentence

from .facts import Question, draw_facts
from .pieces import Pieces
from .row import Kind, Row
from .skills import draw_passages, draw_skill, n_passages
from .turns import ChatTurns, require_template
from .wordings import FILLERS

_FILLER_SHARE = 0.25  # of rows whose facts are hidden in short filler
_TRIES = 50  # pieces of text in which sentences to ask about are looked for

Turns = Callable[[int], ChatTurns]
"""The turns around a number of questions."""


def question_rows(
    tokenizer: Any,
    texts: Iterable[str],
    n: int,
    *,
    length: int,
    kind: Kind = "questions",
    facts: int = 8,
    chat: float = 0.5,
    seed: int = 0,
) -> list[Row]:
    """`n` rows whose facts, questions and answers are all drawn, in text at random places or in repeated filler.

    A row is text with `facts` sentences of one wording hidden between its sentences, each about another name. Then come
    questions about all of them in random order, each with its answer. Only the answers are labelled, from the drawn
    value to the end of the sentence. The text and the first question are the first message of a chat, further
    questions are further ones; in raw text each question and its answer are a line.

    Args:
        tokenizer: of the model.
        texts: documents to hide facts in; a quarter of the rows has repeated filler instead.
        n: rows.
        length: tokens of each row, exactly, special ones included.
        kind: "questions", or a skill: "chain", "values", "count", "order", "comparison" or "passage". A row of
            "passage" has plain questions where the texts lack plain sentences of 4 to 15 words, as code does.
        facts: sentences that are hidden in a row, and asked for.
        chat: share of rows in the tokenizer's chat template, from 0 to 1; the others are raw text.
        seed: of everything that is drawn.

    Raises:
        ValueError: `chat` out of range, `length` is too short for so many facts, texts too short for `length`, or
            `chat` above 0 for a tokenizer without a chat template.

    Source: after the fact-free needles of arXiv:2406.19292, whose loss is of answers alone; wordings are ours.
    """
    rng = random.Random(f"{kind} {seed}")
    rows = draw_question_rows(Pieces(tokenizer, texts), length=length, kind=kind, facts=facts, chat=chat, rng=rng)
    return list(islice(rows, n))


def draw_question_rows(
    pieces: Pieces,
    *,
    length: int,
    kind: Kind = "questions",
    facts: int,
    chat: float,
    rng: random.Random,
    advice: str = "Hide fewer facts, or make longer rows.",
) -> Iterator[Row]:
    """`question_rows` without end, in chats at random; `advice` ends the error for a `length` that is too short."""
    tokenizer = pieces.tokenizer
    require_share_of_chats(chat)

    @cache
    def raw(n: int) -> ChatTurns:
        return ChatTurns.raw(tokenizer, n)

    @cache
    def in_chat(n: int) -> ChatTurns:
        return ChatTurns.chat(tokenizer, n)

    if chat > 0:
        require_template(tokenizer, "use chat=0, which asks in raw text")
        in_chat(facts)  # to refuse a template before the first row
    boundaries = _Boundaries(tokenizer)
    while True:
        turns = in_chat if chat > 0 and rng.random() < chat else raw
        row = None
        if kind == "passage":
            row = _passage_row(pieces, turns(n_passages(facts)), n_passages(facts), length, rng)
        plain: Kind = "questions" if kind == "passage" else kind
        yield row or _row(pieces, boundaries, turns, plain, facts, length, rng, advice)


def require_share_of_chats(chat: float | None) -> None:
    """Raise ValueError unless `chat` is a share from 0 to 1, or None."""
    if chat is not None and not 0 <= chat <= 1:
        raise ValueError(f"chat must be a share from 0 to 1, got {chat}.")


def _row(
    pieces: Pieces,
    boundaries: "_Boundaries",
    turns_of: Turns,
    kind: Kind,
    n: int,
    length: int,
    rng: random.Random,
    advice: str,
) -> Row:
    sentences, questions = _drawn(kind, n, rng)
    turns = turns_of(len(questions))
    hidden = [_ids(pieces, f" {sentence}") for sentence in sentences]
    tail, labelled = _asked(pieces, turns, questions)
    room = length - len(turns.begin) - len(tail) - sum(map(len, hidden))  # tokens of text
    if room < 2 * len(hidden):  # sentences would stand beside each other
        raise ValueError(
            f"length must leave room for text between {len(hidden)} facts, which take {length - room} tokens with "
            f"their questions, got {length}. {advice}"
        )
    if rng.random() < _FILLER_SHARE:
        filler = _ids(pieces, rng.choice(FILLERS))
        text = (filler * (room // len(filler) + 1))[:room]  # cut anywhere, as a piece of a book is
    else:
        text = pieces.draw(room, rng)
    places = boundaries.draw(text, len(hidden), rng)
    ids, used = list(turns.begin), 0  # used: tokens of the text so far
    for place, sentence in zip(places, hidden, strict=True):
        ids += text[used:place] + sentence
        used = place
    ids += text[used:]
    return Row(kind, ids + tail, [0] * len(ids) + labelled)


def _drawn(kind: Kind, n: int, rng: random.Random) -> tuple[list[str], Sequence[Question]]:
    """Sentences to hide, and questions about them."""
    if kind == "questions":
        facts = draw_facts(n, rng)
        return [fact.sentence for fact in facts], rng.sample(facts, n)
    return draw_skill(kind, n, rng)  # type: ignore[arg-type]


def _passage_row(pieces: Pieces, turns: ChatTurns, n: int, length: int, rng: random.Random) -> Row | None:
    """A row of text alone, and questions about sentences of it; its last quarter gives way to them.

    None if no piece of text has so many plain sentences, or questions are longer than a quarter.
    """
    room = length - len(turns.begin)
    least = room * 3 // 4

    def text_of(ids: list[int]) -> str:
        return str(pieces.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    for _ in range(_TRIES):
        text = pieces.draw(room, rng)
        # about what stays whatever the questions take, and stands in the text once
        questions = draw_passages(text_of(text), n, rng, near=text_of(text[:least]))
        if len(questions) < n:
            continue
        tail, labelled = _asked(pieces, turns, questions)
        if len(tail) <= room - least:
            ids = [*turns.begin, *text[: room - len(tail)]]
            return Row("passage", ids + tail, [0] * len(ids) + labelled)
    return None


def _asked(pieces: Pieces, turns: ChatTurns, questions: Sequence[Question]) -> tuple[list[int], list[int]]:
    """Token ids of questions and answers, and which of them are labelled."""
    ids: list[int] = []
    labelled: list[int] = []
    for asked, before, between in zip(questions, turns.before_question, turns.before_answer, strict=True):
        # apart from its answer, so that the first label is the answer's first token
        lead = _ids(pieces, f"{before}{asked.question}{between}{asked.lead}")
        answer = _ids(pieces, asked.answer)
        ids += lead + answer
        labelled += [0] * len(lead) + [1] * len(answer)
    return ids, labelled


def _ids(pieces: Pieces, text: str) -> list[int]:
    return list(pieces.tokenizer(text, add_special_tokens=False)["input_ids"])


class _Boundaries:
    """Where sentences of tokenized text end."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, bool] = {}

    def draw(self, ids: list[int], n: int, rng: random.Random) -> list[int]:
        """`n` sorted places after sentences, different ones if there are enough; anywhere in text without sentences."""
        for i in set(ids) - self._known.keys():
            self._known[i] = ends_sentence(self.tokenizer, i)
        # behind a token, and so never before the first one
        places = [place for place, i in enumerate(ids, 1) if self._known[i]] or list(range(1, len(ids) + 1))
        return sorted(rng.sample(places, n) if len(places) >= n else rng.choices(places, k=n))
