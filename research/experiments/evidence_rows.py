"""Long rows with a question behind them, each with the short text that is enough to answer it."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.prompts.needles import ends_sentence
from trl_ext.rows.facts import Fact, draw_facts
from trl_ext.rows.pieces import Pieces
from trl_ext.rows.turns import ChatTurns
from trl_ext.rows.wordings import FILLERS

_FILLER_SHARE = 0.25  # of rows, in place of books: as in `trl_ext.rows`


@dataclass(frozen=True)
class EvidenceRow:
    """A question about a long text, up to where its answer begins.

    Args:
        prompt: token ids of the long text, the question and the beginning of the reply.
        evidence: the same with one sentence, that of the fact, in place of the long text.
        fact: what is asked about.
    """

    prompt: list[int]
    evidence: list[int]
    fact: Fact

    @property
    def value(self) -> str:
        """What a right answer holds: the drawn number or word, the first one of the answer."""
        return self.fact.answer.split()[0].rstrip(".")


def evidence_rows(
    tokenizer: Any, texts: Iterable[str], n: int, *, length: int, chat: float, facts: int = 8, seed: int = 0
) -> list[EvidenceRow]:
    """`n` rows of the facts, wordings and texts of `trl_ext.rows.question_rows`, with one question each.

    Args:
        tokenizer: of the model.
        texts: documents to hide facts in.
        n: rows.
        length: tokens of each prompt, exactly.
        chat: share of rows in the tokenizer's chat template; the others are raw text.
        facts: sentences of one wording that are hidden in a row, of which one is asked about.
        seed: of everything that is drawn.

    Raises:
        ValueError: `length` has no room for the facts and the question.
    """
    rng = random.Random(f"evidence {seed}")
    pieces, ends = Pieces(tokenizer, texts), set(closing_tokens(tokenizer))
    raw, in_chat = ChatTurns.raw(tokenizer, 1), ChatTurns.chat(tokenizer, 1) if chat > 0 else None
    rows = []
    for _ in range(n):
        turns = in_chat if in_chat is not None and rng.random() < chat else raw
        drawn = draw_facts(facts, rng)
        rows.append(_row(pieces, ends, turns, drawn, rng.choice(drawn), length, rng))
    return rows


def closing_tokens(tokenizer: Any) -> list[int]:
    """All tokens behind which a sentence or a line has ended."""
    return [i for i in range(len(tokenizer)) if ends_sentence(tokenizer, i)]


def _row(
    pieces: Pieces, ends: set[int], turns: ChatTurns, facts: list[Fact], asked: Fact, length: int, rng: random.Random
) -> EvidenceRow:
    def ids_of(text: str) -> list[int]:
        return list(pieces.tokenizer(text, add_special_tokens=False)["input_ids"])

    hidden = [ids_of(f" {fact.sentence}") for fact in facts]
    tail = ids_of(f"{turns.before_question[0]}{asked.question}{turns.before_answer[0]}{asked.lead}")
    room = length - len(turns.begin) - len(tail) - sum(map(len, hidden))
    if room < 2 * len(facts):
        raise ValueError(
            f"length must leave room for text between {len(facts)} facts, which take {length - room} tokens with the "
            f"question, got {length}: a row without the asked fact could not be answered. Make longer rows."
        )
    if rng.random() < _FILLER_SHARE:
        filler = ids_of(rng.choice(FILLERS))
        text = (filler * (room // len(filler) + 1))[:room]
    else:
        text = pieces.draw(room, rng)
    prompt = [*turns.begin, *_with_sentences(text, hidden, ends, rng), *tail]
    return EvidenceRow(prompt, [*turns.begin, *ids_of(asked.sentence), *tail], asked)


def _with_sentences(
    text: Sequence[int], sentences: Sequence[list[int]], ends: set[int], rng: random.Random
) -> list[int]:
    """`text` with each of `sentences` behind a random one of its own; anywhere where it has too few."""
    places = [place for place, i in enumerate(text, 1) if i in ends]
    if len(places) < len(sentences):
        places = list(range(1, len(text) + 1))
    ids, used = [], 0
    for place, sentence in zip(sorted(rng.sample(places, len(sentences))), sentences, strict=True):
        ids += [*text[used:place], *sentence]
        used = place
    return [*ids, *text[used:]]
