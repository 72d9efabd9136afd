"""Rows of text with hidden facts, and questions about them at the end whose answers are labelled."""

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from rope_patch.prompts.needles import ends_sentence

from .facts import Fact, draw_facts
from .pieces import Pieces
from .row import Row
from .turns import ChatTurns, require_template
from .wordings import FILLERS

_FILLER_SHARE = 0.25  # of rows whose facts are hidden in short filler


def question_rows(
    tokenizer: Any,
    texts: Iterable[str],
    n: int,
    *,
    length: int,
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
        facts: sentences that are hidden in a row, and asked for.
        chat: share of rows in the tokenizer's chat template, from 0 to 1; the others are raw text.
        seed: of everything that is drawn.

    Raises:
        ValueError: `chat` out of range, `length` is too short for so many facts, texts too short for `length`, or
            `chat` above 0 for a tokenizer without a chat template.

    Source: after the fact-free needles of arXiv:2406.19292, whose loss is of answers alone; wordings are ours.
    """
    rows = draw_question_rows(
        Pieces(tokenizer, texts), length=length, facts=facts, chat=chat, rng=random.Random(f"questions {seed}")
    )
    return list(islice(rows, n))


def draw_question_rows(
    pieces: Pieces,
    *,
    length: int,
    facts: int,
    chat: float,
    rng: random.Random,
    advice: str = "Hide fewer facts, or make longer rows.",
) -> Iterator[Row]:
    """`question_rows` without end, in chats at random; `advice` ends the error for a `length` that is too short."""
    tokenizer = pieces.tokenizer
    require_share_of_chats(chat)
    if chat > 0:
        require_template(tokenizer, "use chat=0, which asks in raw text")
    raw, turns = ChatTurns.raw(tokenizer, facts), ChatTurns.chat(tokenizer, facts) if chat > 0 else None
    boundaries = _Boundaries(tokenizer)
    while True:
        in_chat = turns is not None and rng.random() < chat
        yield _row(pieces, boundaries, turns if turns is not None and in_chat else raw, facts, length, rng, advice)


def require_share_of_chats(chat: float | None) -> None:
    """Raise ValueError unless `chat` is a share from 0 to 1, or None."""
    if chat is not None and not 0 <= chat <= 1:
        raise ValueError(f"chat must be a share from 0 to 1, got {chat}.")


def _row(
    pieces: Pieces, boundaries: "_Boundaries", turns: ChatTurns, n: int, length: int, rng: random.Random, advice: str
) -> Row:
    drawn = draw_facts(n, rng)
    hidden = [_ids(pieces, f" {fact.sentence}") for fact in drawn]
    tail, labelled = _asked(pieces, turns, rng.sample(drawn, n))
    room = length - len(turns.begin) - len(tail) - sum(map(len, hidden))
    if room < 2 * n:
        raise ValueError(
            f"length must leave room for text between {n} facts, which take {length - room} tokens with their "
            f"questions, got {length}. {advice}"
        )
    if rng.random() < _FILLER_SHARE:
        filler = _ids(pieces, rng.choice(FILLERS))
        text = (filler * (room // len(filler) + 1))[:room]
    else:
        text = pieces.draw(room, rng)
    places = boundaries.draw(text, n, rng)
    ids, used = list(turns.begin), 0
    for place, sentence in zip(places, hidden, strict=True):
        ids += text[used:place] + sentence
        used = place
    ids += text[used:]
    return Row("questions", ids + tail, [0] * len(ids) + labelled)


def _asked(pieces: Pieces, turns: ChatTurns, facts: list[Fact]) -> tuple[list[int], list[int]]:
    """Token ids of questions and answers, and which of them are labelled."""
    ids: list[int] = []
    labelled: list[int] = []
    for fact, before, between in zip(facts, turns.before_question, turns.before_answer, strict=True):
        lead = _ids(pieces, f"{before}{fact.question}{between}{fact.lead}")
        answer = _ids(pieces, fact.answer)
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
        places = [place for place, i in enumerate(ids, 1) if self._known[i]] or list(range(1, len(ids) + 1))
        return sorted(rng.sample(places, n) if len(places) >= n else rng.choices(places, k=n))
