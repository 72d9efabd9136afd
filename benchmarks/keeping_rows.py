"""Training rows of the native window: books, the model's own chats, and questions about far sentences.

A row is read twice: by the model as it was pretrained, at true positions, and by the one that is trained, at indices
with gaps in them. Wordings, keys and haystacks are others than those of keeping_questions.py.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from keeping_questions import ids_of

_FACTS = [
    ("{k}'s phone extension is {v}.", "What is {k}'s phone extension?", "{k}'s phone extension is {v}."),
    ("Parcel {k} weighs {v} grams.", "How many grams does parcel {k} weigh?", "Parcel {k} weighs {v} grams."),
    ("Remember: the number of room {k} is {v}.", "What is the number of room {k}?", "The number of room {k} is {v}."),
    ("In {k}, {v} people were counted.", "How many people were counted in {k}?", "In {k}, {v} people were counted."),
    ("The token for {k} equals {v}.", "Which token is given for {k}?", "The token for {k} equals {v}."),
    ("{k} was founded with {v} coins.", "With how many coins was {k} founded?", "{k} was founded with {v} coins."),
    ("One should note that {k} stands for {v}.", "What does {k} stand for?", "{k} stands for {v}."),
    ("The badge of {k} reads {v}.", "What does the badge of {k} read?", "The badge of {k} reads {v}."),
]
_SYLLABLES = "ba cor del fin gra hol jun kas lem mor nor pel qui ras sol tur ven wil yor zan".split()
_FILLERS = [
    "The river runs on. Trees line the bank. A boat goes by. Nothing else happens. ",
    "Rain falls on the roof. The clock ticks. Somebody coughs. It is late. ",
    "One, two, three, four. Five, six, seven, eight. Nine and ten. Then again. ",
]


@dataclass(frozen=True)
class Row:
    """Token ids, and which of them are answers (1) that a next-token loss may be taken of."""

    ids: list[int]
    answer: list[int]


def book_rows(documents: Sequence[Sequence[int]], length: int, rng: random.Random) -> Iterator[Row]:
    """Pieces of books, at random, without end."""
    long_enough = [d for d in documents if len(d) > length]
    while True:
        book = rng.choice(long_enough)
        first = rng.randrange(len(book) - length)
        yield Row([int(i) for i in book[first : first + length]], [0] * length)


def chat_rows(chats: Sequence[Sequence[int]], length: int, rng: random.Random) -> Iterator[Row]:
    """Chats one after the other, cut at `length`, without end."""
    while True:
        ids: list[int] = []
        while len(ids) < length:
            ids += rng.choice(chats)
        yield Row(ids[:length], [0] * length)


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 3)))).capitalize()


def question_rows(
    tokenizer: Any, documents: Sequence[Sequence[int]], length: int, rng: random.Random, facts: int = 6
) -> Iterator[Row]:
    """Sentences in a book, in chats' template or raw, and behind them a question about each, answered; without end."""
    books = book_rows(documents, length, rng)
    begin, turn, next_turn = _template(tokenizer)
    while True:
        template = rng.choice(_FACTS)
        names = [_name(rng) for _ in range(facts)]
        values = [str(rng.randrange(10 ** rng.choice((3, 4, 5)), 10**6)) for _ in range(facts)]
        if len(set(names)) < facts:
            continue
        chat = rng.random() < 0.5
        tail: list[int] = []
        answered: list[int] = []
        order = list(range(facts))
        rng.shuffle(order)
        for n, k in enumerate(order):
            question = template[1].format(k=names[k])
            before = (question + turn) if n == 0 else next_turn.replace("=text=", question)
            before = before if chat else f" {question} "
            before = "\n" + before if n == 0 or not chat else before
            asked, reply = template[2].split("{v}")
            lead = ids_of(tokenizer, before + asked.format(k=names[k]).rstrip(" "))
            answer = ids_of(tokenizer, f" {values[k]}{reply}")
            tail += lead + answer
            answered += [0] * len(lead) + [1] * len(answer)
        needles = [ids_of(tokenizer, " " + template[0].format(k=k, v=v)) for k, v in zip(names, values, strict=True)]
        head = begin if chat else []
        room = length - len(head) - len(tail) - sum(map(len, needles))
        if rng.random() < 0.25:
            filler = ids_of(tokenizer, rng.choice(_FILLERS))
            hay = (filler * (room // len(filler) + 1))[:room]
        else:
            hay = next(books).ids[:room]
        places = sorted(rng.randrange(room) for _ in needles)
        ids, used = list(head), 0
        for place, piece in zip(places, needles, strict=True):
            ids += hay[used:place] + piece
            used = place
        ids += hay[used:]
        yield Row(ids + tail, [0] * len(ids) + answered)


def _template(tokenizer: Any) -> tuple[list[int], str, str]:
    """Token ids before a user's text, the text up to the answer, and a further turn with =text= in it."""
    messages = [
        {"role": "user", "content": "=first="},
        {"role": "assistant", "content": "=reply="},
        {"role": "user", "content": "=text="},
    ]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, rest = shown.split("=first=")
    turn, next_turn = rest.split("=reply=")
    return ids_of(tokenizer, before), turn, next_turn


def gaps(length: int, target: int, pieces: int, generator: torch.Generator) -> torch.Tensor:
    """RoPE indices of a row in `pieces` pieces, [length]: split uniformly, moved apart to anywhere within `target`."""
    index = torch.arange(length)
    if pieces < 2:
        return index
    splits = torch.randperm(length - 1, generator=generator)[: pieces - 1].sort().values + 1
    total = int(torch.randint(0, target - length + 1, (), generator=generator))
    ends = torch.randint(0, total + 1, (pieces - 2,), generator=generator)
    moved = torch.cat([ends, torch.tensor([total])]).sort().values
    for split, before, after in zip(splits, [0, *moved.tolist()[:-1]], moved.tolist(), strict=True):
        index[split:] += after - before
    return index
