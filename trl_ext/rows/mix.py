"""Rows of several kinds in given shares, long and short, in random order."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from rope_patch.base.validators import require_integer, require_number
from rope_patch.layout.special_tokens import SpecialTokens

from .pieces import Pieces
from .questions import draw_question_rows, require_share_of_chats
from .row import ASKING, KINDS, Kind, Row, shares_with

if TYPE_CHECKING:
    from datasets import Dataset

SHORTER = 8  # short rows in place of a long one
SHORT_FACTS = 3  # in a short row, at most

Ids = Sequence[Sequence[int]]
OwnTexts = Ids | Callable[[], Ids]
"""Texts of the model, or a function that returns them, called after rows of other kinds are made."""


def mixed_rows(tokenizer: Any, n: int, **options: Any) -> "Dataset":
    """The rows of `make_rows` as a dataset, with columns `input_ids` and `completion_mask`, 1 on labelled tokens.

    `RopeSFTTrainer` takes it as it is. Next-token loss is then of labelled tokens alone.

    Args:
        tokenizer: of the model.
        n: rows of `length` tokens, of which some are made as shorter ones.
        **options: of `make_rows`.

    Raises:
        ValueError: as `make_rows`.
    """
    from datasets import Dataset

    rows = make_rows(tokenizer, n, **options)
    return Dataset.from_dict(
        {"input_ids": [row.ids for row in rows], "completion_mask": [row.labelled for row in rows]}
    )


def make_rows(
    tokenizer: Any,
    n: int,
    *,
    length: int,
    texts: Iterable[str] = (),
    chats: OwnTexts = (),
    own_texts: OwnTexts = (),
    shares: Mapping[str, float] | None = None,
    short: float = 0.25,
    facts: int = 8,
    chat: float | None = None,
    label_all: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> list[Row]:
    """Training rows that keep what a model can do: running text, its own chats, and questions about hidden facts.

    Of each kind, the share `short` of the rows is made as eight rows of `length` // 8 tokens each. All rows are then
    shuffled.

    Args:
        tokenizer: of the model.
        n: rows of `length` tokens, counted before some are made as shorter ones.
        length: tokens of a row, special ones included: the window that the model was trained on.
        texts: documents for "text", "questions" and skills.
        chats: of `own_chats`, for "chats"; or a function that samples them, called after all other rows are made.
        own_texts: of `own_texts`, for "own_texts"; or such a function.
        shares: kind -> weight, of which each row kind gets its part; None means `shares_with("chats")`.
        short: share of rows made as shorter ones, from 0 to 1.
        facts: facts hidden in a row of questions or of a skill; at most three in a short one.
        chat: share of question rows in the chat template; None means half, and 0 for a tokenizer without a template.
        label_all: whether all tokens of rows other than questions are labelled; else none is.
        seed: of everything that is drawn.
        progress: whether a bar is shown.

    Raises:
        ValueError: an unknown kind, a number out of range, nothing to make a kind of rows of, or text that is too
            short.
    """
    if not 0 <= short <= 1:
        raise ValueError(f"short must be a share from 0 to 1, got {short}.")
    require_integer("facts", facts, least=1)
    require_share_of_chats(chat)
    counts = rows_by_kind(n, shares)
    sources: dict[Kind, OwnTexts] = {"chats": chats, "own_texts": own_texts}
    for kind in sources.keys() & counts.keys():
        if not callable(sources[kind]):
            _require_texts(kind, sources[kind])  # type: ignore[arg-type]
    if chat is None:
        chat = 0.5 if getattr(tokenizer, "chat_template", None) else 0.0
    pieces = Pieces(tokenizer, texts) if {"text", *ASKING} & counts.keys() else None
    rows: list[Row] = []
    # last what the model writes, which takes longest: texts that are too short are refused before
    for kind, count in sorted(counts.items(), key=lambda item: item[0] in sources):
        if kind in sources:
            source = sources[kind]
            texts_of_model = source() if callable(source) else source
            _require_texts(kind, texts_of_model)
            # one for long and short rows, so that no text is used twice before all are used once
            pool = _Pool(kind, texts_of_model, random.Random(f"{kind} {seed}"))
        n_short = round(short * count)
        with tqdm(total=count, desc=f"rows of {kind}", unit="row", disable=not progress) as bar:
            for size, several in ((length, count - n_short), (length // SHORTER, SHORTER * n_short)):
                # a stream for each kind and size: other shares leave the rest of these rows as they are
                rng = random.Random(f"{kind} {size} {seed}")
                if kind in sources:
                    made = pool.rows(size, label_all)
                elif kind == "text":
                    assert pieces is not None
                    made = _text_rows(pieces, size, label_all, rng)
                else:
                    assert pieces is not None
                    options: dict[str, Any] = {"facts": facts}
                    if size != length:
                        options = {
                            "facts": min(facts, SHORT_FACTS),
                            "advice": f"Short rows have an eighth of length {length}: give a larger length, or short=0 "
                            "(--short 0), which makes no short rows.",
                        }
                    made = draw_question_rows(pieces, length=size, kind=kind, chat=chat, rng=rng, **options)
                for row in islice(made, several):
                    rows.append(row)
                    bar.update(size / length)  # a short row is an eighth
    random.Random(f"order {seed}").shuffle(rows)
    return rows


def text_rows_for_training(
    tokenizer: Any, texts: Iterable[str], n: int, *, length: int, label_all: bool = False, seed: int = 0
) -> list[Row]:
    """`n` rows of running text from random places, each after the tokenizer's beginning of a text.

    Each row is of one document where one is long enough. Rows may overlap.

    Args:
        tokenizer: of the model.
        texts: documents.
        n: rows.
        length: tokens of each row, special ones included.
        label_all: whether all tokens are labelled; else none is.
        seed: of the places.

    Raises:
        ValueError: text that is too short.
    """
    return list(islice(_text_rows(Pieces(tokenizer, texts), length, label_all, random.Random(f"text {seed}")), n))


def rows_by_kind(n: int, shares: Mapping[str, float] | None = None) -> dict[Kind, int]:
    """Rows of each kind, `n` in all: its share, rounded.

    Raises:
        ValueError: an unknown kind, a weight below 0, or no weight above 0.
    """
    weights = shares_with("chats") if shares is None else shares
    for kind, weight in weights.items():
        if kind not in KINDS:
            raise ValueError(f"shares must be of {', '.join(KINDS)}, got {kind!r}.")
        require_number(f"the share of {kind}", weight, least=0)
    total = sum(weights.values())
    if not 0 < total < math.inf:
        raise ValueError(f"shares must have a weight above 0 and a finite sum, got {dict(weights)}.")
    counts: dict[Kind, int] = {}
    done, reached = 0, 0.0
    for kind in KINDS:
        # differences of rounded sums, which add up to n as rounded shares need not
        reached += weights.get(kind, 0) / total * n
        count = round(reached) - done
        if count:
            counts[kind] = count
            done += count
    return counts


def _require_texts(kind: Kind, texts: Ids) -> None:
    if not (texts and all(texts)):
        raise ValueError(
            f"{kind} must hold texts of at least a token each, as shares asks for them: sample some with "
            f"own_{kind.removeprefix('own_')}, or leave {kind!r} out of shares."
        )


def _text_rows(pieces: Pieces, length: int, label: bool, rng: random.Random) -> Iterator[Row]:
    begin = SpecialTokens.of(pieces.tokenizer).begin
    while True:
        yield Row.with_one_label("text", [*begin, *pieces.draw(length - len(begin), rng)], label)


class _Pool:
    """Texts in random order, each used once before one is used again."""

    def __init__(self, kind: Kind, texts: Ids, rng: random.Random) -> None:
        self.kind, self.texts, self.rng = kind, texts, rng
        self.left: list[Sequence[int]] = []

    def rows(self, length: int, label: bool) -> Iterator[Row]:
        """Rows of texts in sequence: whole texts while one fits, then the beginning of another."""
        while True:
            ids: list[int] = []
            while len(ids) < length:
                if not self.left:
                    self.left = self.rng.sample(self.texts, len(self.texts))
                room = length - len(ids)
                number = next((k for k, text in enumerate(self.left) if len(text) <= room), 0)  # 0: one is cut
                ids += self.left.pop(number)[:room]
            yield Row.with_one_label(self.kind, ids, label)
