"""Needle-in-a-haystack prompts: sentences that are hidden in text at chosen depths, and a question about them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from .asking import Frame, tokens_after
from .wordings import NEEDLE_WORDINGS, PASSKEY_OF, PASSKEY_WORDINGS

Kind = Literal["passkey", "several", "single", "multikey", "multivalue", "multiquery", "ordinal"]

KINDS: tuple[Kind, ...] = ("passkey", "several", "single", "multikey", "multivalue", "multiquery", "ordinal")

_ADJECTIVES = (
    "amber brave calm dusty eager faint gentle hollow ivory jolly keen lively mellow narrow olden proud quiet rapid "
    "silent tidy urban vivid windy young"
).split()
_NOUNS = (
    "anchor basket candle dragon engine feather garden hammer island jacket kettle ladder marble needle orchard pencil "
    "quarry ribbon saddle tunnel umbrella valley window yard"
).split()
_NAMES = (
    "Anna Boris Clara David Emma Felix Greta Henry Iris Jacob Karin Leo Maria Nils Olga Peter Rosa Simon Tina Victor"
).split()
# kinds with the same needles in the same places: a model reads the text once for both
_ABOUT_THE_SAME: tuple[tuple[Kind, ...], ...] = (("multikey", "multiquery"), ("multivalue", "ordinal"))
_REPLY_TOKENS: dict[Kind, int] = {"passkey": 10, "several": 10, "single": 24, "multikey": 24, "ordinal": 24}
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class RetrievalPrompt:
    """A prompt and its right answers.

    Args:
        ids: token IDs of the prompt.
        answers: strings that a right reply holds; the score is the share of them.
        position: token index at which the needle at the chosen depth starts.
        first_number_only: whether only the first number of the reply counts, because the text holds other values of the
            same key.
        answer_ids: token IDs of each of `answers`, as they follow one another in a right reply.
        graded: whether each of these tokens has a digit; a space or a comma before a number is no answer.
        wording: index of its phrasing in `rope_patch.prompts.wordings`.
        question: the question, with the beginning of the answer.
    """

    ids: list[int]
    answers: list[str]
    position: int
    first_number_only: bool
    answer_ids: list[list[int]]
    graded: list[list[bool]]
    wording: int = 0
    question: str = ""

    def score(self, reply: str) -> float:
        """Share of `answers` in `reply`."""
        if self.first_number_only:
            numbers = "".join(c if c.isdigit() else " " for c in reply).split()
            return float(bool(numbers) and numbers[0] == self.answers[0])
        return sum(answer in reply for answer in self.answers) / len(self.answers)

    @property
    def right_reply(self) -> list[int]:
        """Token IDs of all answers, one after the other."""
        return [i for ids in self.answer_ids for i in ids]

    def forced_score(self, choices: Sequence[int]) -> float:
        """Share of `answers` that the model gives under teacher forcing: every digit is its choice.

        Args:
            choices: [len(right_reply)], the model's choice at each token of the right reply.
        """
        left, n_right = iter(choices), 0
        for ids, graded in zip(self.answer_ids, self.graded, strict=True):
            # a list, because the tokens after a wrong one are taken too
            right = [next(left) == token or not counts for token, counts in zip(ids, graded, strict=True)]
            n_right += all(right)
        return n_right / len(self.answers)


def reply_tokens(kind: Kind, n_needles: int) -> int:
    """Most tokens of a reply."""
    return _REPLY_TOKENS.get(kind, 16 * n_needles)


def about_the_same(kind: Kind, n_needles: int) -> tuple[Kind, ...]:
    """The kinds whose prompts have the same needles in the same places, at the same length, depth and draw."""
    kinds = next((kinds for kinds in _ABOUT_THE_SAME if kind in kinds), (kind,))
    return tuple(k for k in kinds if k != "ordinal" or n_needles <= len(_ORDINALS))


class TooFewTokensError(ValueError):
    """A prompt has no room for its needles and its question."""


def make_prompt(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    haystack: Sequence[int],
    *,
    n_tokens: int | None,
    depth: float,
    n_needles: int,
    rng: random.Random,
    chat: bool = False,
    wording: int = 0,
) -> RetrievalPrompt:
    """Hide needles in the first tokens of `haystack` so that the prompt has exactly `n_tokens`.

    A needle goes between two sentences if one ends within 32 tokens before its place. From the same draws, "multikey"
    and "multiquery" hide the same needles in the same places, and so do "multivalue" and "ordinal", and "several" at
    all depths: their prompts differ after the last needle only.

    Args:
        kind: "single": one key with one value. "multikey": the same among other keys. "multivalue": one key with
            several values, and the question is about all. "multiquery": a question about several keys. "ordinal": one
            key with several values, and the question is about the first, second, ... or last. "passkey": the sentences
            of Landmark Attention. "several": these with a pass key for each of several people, at equal distances; the
            question is about the one nearest to `depth`.
        tokenizer: of the model.
        haystack: token IDs, at least `n_tokens`.
        n_tokens: tokens of the prompt, with question and template; None means the whole haystack.
        depth: place of a needle that the question is about, from 0, the start, to 1, right before the question. Two
            kinds with the same needles have them in the same places; if this kind's question and reply are shorter, 1
            is as many tokens before the question.
        n_needles: number of needles, at least 2; 1 for "single" and "passkey".
        rng: draws keys, values and places.
        chat: whether haystack and question are a user's message in the tokenizer's chat template, and the model's
            answer begins with the words that otherwise end the question.
        wording: index of the phrasing in `rope_patch.prompts.wordings`. A passkey's filler belongs to it too.

    Raises:
        TooFewTokensError: `n_tokens` is too short for needles and question.
        ValueError: the haystack is too short for the prompt.
    """
    frame = Frame.of(tokenizer, chat)
    needles = _draw_needles(kind, n_needles, rng, wording, depth)
    at_equal_distances = [(2 * i + 1) / (2 * n_needles) for i in range(n_needles)]
    depths = at_equal_distances if kind == "several" else _draw_depths(needles, depth, rng)
    pieces = [tokens_after(tokenizer, " " + sentence) for sentence in needles.sentences]

    def tail_of(asked: _Question) -> list[int]:
        """What follows the haystack."""
        parts = [asked.question, frame.turn + asked.beginning] if chat else [f"{asked.question} {asked.beginning}"]
        return [i for part in parts for i in tokens_after(tokenizer, part)]

    question, beginning, answers = asked = _question(kind, needles, wording)
    tail = tail_of(asked)
    taken = len(frame.begin) + len(tail) + sum(map(len, pieces))
    budget = len(haystack) if n_tokens is None else n_tokens - taken  # tokens of the haystack
    _require_room(n_tokens, budget, len(haystack), f"{len(pieces)} needle(s) and the question of {kind!r}")
    # the budget of the longest tail and reply about these needles, so that all have the same places
    longest = max(
        len(tail_of(_question(k, about, wording))) + reply_tokens(k, n_needles) for k, about in _alike(kind, needles)
    )
    shared = max(budget + len(tail) + reply_tokens(kind, n_needles) - longest, 1)
    body, starts = _hidden(tokenizer, haystack[:budget], pieces, depths, shared)
    ids, position = [*frame.begin, *body, *tail], len(frame.begin) + starts[needles.at_depth]
    answer_ids: list[list[int]] = []
    before = beginning
    for answer in answers:
        text = f", {answer}" if answer_ids else f" {answer}"
        answer_ids.append(tokens_after(tokenizer, text, before))
        before += text
    graded = [[any(c.isdigit() for c in str(tokenizer.decode([i]))) for i in answer] for answer in answer_ids]
    shown = f"{question} {beginning}".strip()
    return RetrievalPrompt(ids, answers, position, kind == "ordinal", answer_ids, graded, wording, shown)


def hide(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Sequence[int],
    sentences: Sequence[str],
    question: str,
    beginning: str,
    *,
    n_tokens: int,
    depths: Sequence[float],
    chat: bool = False,
) -> list[int]:
    """The token IDs of a prompt of exactly `n_tokens`: sentences hidden in a text, and a question about them.

    A sentence goes between two others if one ends within 32 tokens before its place.

    Args:
        tokenizer: of the model.
        haystack: token IDs of the text, at least `n_tokens`.
        sentences: what is hidden.
        question: what stands behind the text.
        beginning: the beginning of the answer, which ends the prompt.
        n_tokens: tokens of the prompt, with question and template.
        depths: place of each sentence, from 0, the start of the text, to 1, right before the question.
        chat: whether text and question are a user's message in the tokenizer's chat template.

    Raises:
        TooFewTokensError: `n_tokens` is too short for sentences and question.
        ValueError: the haystack is too short for the prompt.
    """
    frame = Frame.of(tokenizer, chat)
    parts = [question, frame.turn + beginning] if chat else [f"{question} {beginning}"]
    tail = [i for part in parts for i in tokens_after(tokenizer, part)]
    pieces = [tokens_after(tokenizer, " " + sentence) for sentence in sentences]
    budget = n_tokens - len(frame.begin) - len(tail) - sum(map(len, pieces))
    _require_room(n_tokens, budget, len(haystack), f"{len(pieces)} sentence(s) and the question")
    text, _ = _hidden(tokenizer, haystack[:budget], pieces, depths, budget)
    return [*frame.begin, *text, *tail]


def _require_room(n_tokens: int | None, budget: int, available: int, what: str) -> None:
    """Raise unless a prompt has room for a text of `budget` tokens, and the haystack has as many."""
    if budget < 1:
        raise TooFewTokensError(
            f"{n_tokens} tokens are too few for {what}, which take {(n_tokens or 0) - budget}: use a longer length."
        )
    if available < budget:
        raise ValueError(f"the haystack has {available} tokens, {budget} are needed: give more text.")


def _hidden(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Sequence[int],
    pieces: Sequence[list[int]],
    depths: Sequence[float],
    deepest: int,
) -> tuple[list[int], list[int]]:
    """The haystack with each piece at its depth of the first `deepest` tokens, and the index at which it starts."""
    ids: list[int] = []
    used, starts = 0, [0] * len(pieces)
    for i in sorted(range(len(pieces)), key=lambda i: depths[i]):
        place = _sentence_end(tokenizer, haystack, round(depths[i] * deepest), at_least=used)
        ids += haystack[used:place]
        used, starts[i] = place, len(ids)
        ids += pieces[i]
    return [*ids, *haystack[used:]], starts


class _Needles(NamedTuple):
    """Sentences to hide in a text, each with its key and its number."""

    sentences: list[str]
    keys: list[str]  # "" for a passkey
    values: list[str]
    at_depth: int  # index of the one at the chosen depth
    in_order: bool  # whether they appear in the text in this order


class _Question(NamedTuple):
    """A question, the beginning of the sentence that answers it, and the answers, in the order of a right reply."""

    question: str
    beginning: str
    answers: list[str]


def _alike(kind: Kind, needles: _Needles) -> list[tuple[Kind, _Needles]]:
    """The kinds, or for "several" the depths, that ask about the same needles."""
    n = len(needles.sentences)
    if kind == "several":
        return [(kind, needles._replace(at_depth=i)) for i in range(n)]
    return [(k, needles) for k in about_the_same(kind, n)]


def _draw_needles(kind: Kind, n_needles: int, rng: random.Random, wording: int, depth: float) -> _Needles:
    if kind == "passkey":
        key = str(rng.randint(10000, 99999))
        return _Needles([PASSKEY_WORDINGS[wording].needle.format(key=key)], [""], [key], 0, False)
    if kind == "several":
        names = rng.sample(_NAMES, n_needles)
        keys = [str(key) for key in rng.sample(range(10_000, 100_000), n_needles)]
        sentences = [PASSKEY_OF.needle.format(name=name, key=key) for name, key in zip(names, keys, strict=True)]
        return _Needles(sentences, names, keys, min(int(depth * n_needles), n_needles - 1), False)
    n = 1 if kind == "single" else n_needles
    if kind == "ordinal" and n > len(_ORDINALS):
        raise ValueError(f"'ordinal' needs n_needles <= {len(_ORDINALS)}, got {n_needles}.")
    one_key = kind in ("multivalue", "ordinal")
    pairs = rng.sample([f"{a}-{b}" for a in _ADJECTIVES for b in _NOUNS], 1 if one_key else n)
    keys = pairs * n if one_key else pairs
    values = [str(v) for v in rng.sample(range(1_000_000, 10_000_000), n)]
    words = NEEDLE_WORDINGS[wording]
    sentence = words.one_of if one_key else words.only
    sentences = [sentence.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    return _Needles(sentences, keys, values, rng.randrange(n) if one_key else 0, one_key)


def _draw_depths(needles: _Needles, depth: float, rng: random.Random) -> list[float]:
    n = len(needles.sentences)
    if not needles.in_order:
        return [depth if i == needles.at_depth else rng.random() for i in range(n)]
    # sorted, so that the needles keep their order in the text
    before = sorted(rng.uniform(0, depth) for _ in range(needles.at_depth))
    after = sorted(rng.uniform(depth, 1) for _ in range(n - needles.at_depth - 1))
    return [*before, depth, *after]


def _question(kind: Kind, needles: _Needles, wording: int) -> _Question:
    if kind == "passkey":
        passkey = PASSKEY_WORDINGS[wording]
        return _Question(passkey.question, passkey.beginning, needles.values)
    if kind == "several":
        name, key = needles.keys[needles.at_depth], needles.values[needles.at_depth]
        return _Question(PASSKEY_OF.question.format(name=name), PASSKEY_OF.beginning.format(name=name), [key])
    words = NEEDLE_WORDINGS[wording]
    every, be, number, keys, answers = "", "is", words.number, needles.keys[0], needles.values[:1]
    if kind == "ordinal":
        is_last = needles.at_depth == len(needles.values) - 1
        number = f"{'last' if is_last else _ORDINALS[needles.at_depth]} {words.number}"
        answers = [needles.values[needles.at_depth]]
    elif kind in ("multivalue", "multiquery"):
        be, number, answers = "are", words.numbers, needles.values
        if kind == "multivalue":
            every = "all "
        else:
            keys = f"{', '.join(needles.keys[:-1])} and {needles.keys[-1]}"
    asked = f"the {number} {words.of} {keys}"
    question = words.question.format(be=be, asked=every + asked)
    return _Question(question, words.beginning.format(be=be, asked=asked, Asked=asked.capitalize()), answers)


def _sentence_end(tokenizer: PreTrainedTokenizerBase, haystack: Sequence[int], place: int, at_least: int) -> int:
    for end in range(place, max(at_least, place - 32, 0), -1):
        if ends_sentence(tokenizer, haystack[end - 1]):
            return end
    return max(place, at_least)


def ends_sentence(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a token ends a sentence, by a closing mark or a line break."""
    return str(tokenizer.decode([token])).rstrip(" ").endswith((".", "!", "?", "\n"))
