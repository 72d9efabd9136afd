"""Retrieval prompts: sentences to be found again, hidden in running text at chosen depths."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from .asking import Frame, tokens_behind
from .wordings import NEEDLE_WORDINGS, PASSKEY_WORDINGS

Kind = Literal["passkey", "single", "multikey", "multivalue", "multiquery", "ordinal"]

KINDS: tuple[Kind, ...] = ("passkey", "single", "multikey", "multivalue", "multiquery", "ordinal")

_ADJECTIVES = (
    "amber brave calm dusty eager faint gentle hollow ivory jolly keen lively mellow narrow olden proud quiet rapid "
    "silent tidy urban vivid windy young"
).split()
_NOUNS = (
    "anchor basket candle dragon engine feather garden hammer island jacket kettle ladder marble needle orchard pencil "
    "quarry ribbon saddle tunnel umbrella valley window yard"
).split()
# kinds that ask about the same sentences in the same places: one reading of the text serves both
_ABOUT_THE_SAME: tuple[tuple[Kind, ...], ...] = (("multikey", "multiquery"), ("multivalue", "ordinal"))
_REPLY_TOKENS: dict[Kind, int] = {"passkey": 10, "single": 24, "multikey": 24, "ordinal": 24}
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class RetrievalPrompt:
    """One prompt and what counts as its answer.

    Args:
        ids: token ids of the prompt, of exactly the length asked for less the tokens to be generated.
        answers: strings to be found; the score is the share found.
        position: token index at which the needle at the wanted depth starts.
        first_number_only: whether only the first number of the reply counts, because other values of the same key are
            in the text as well.
        answer_ids: token ids of each of `answers`, as they stand behind one another in a right reply.
        graded: of each of these tokens, whether it has a digit: a space or a comma before a number is no answer.
        wording: number of its phrasing in `rope_patch.prompts.wordings`.
        question: what is asked, up to where the model goes on.
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
        """Token ids of all answers, one behind the other."""
        return [i for ids in self.answer_ids for i in ids]

    def forced_score(self, choices: Sequence[int]) -> float:
        """Share of `answers` whose every digit is the model's choice behind the prompt and the tokens before.

        Args:
            choices: [len(right_reply)], the model's choice at each token of the right reply.
        """
        at, n_right = 0, 0
        for ids, counts in zip(self.answer_ids, self.graded, strict=True):
            of_answer = choices[at : at + len(ids)]
            n_right += all(a == b for a, b, graded in zip(ids, of_answer, counts, strict=True) if graded)
            at += len(ids)
        return n_right / len(self.answers)


def reply_tokens(kind: Kind, n_needles: int) -> int:
    """Tokens that a reply may have."""
    return _REPLY_TOKENS.get(kind, 16 * n_needles)


def about_the_same(kind: Kind, n_needles: int) -> tuple[Kind, ...]:
    """The kinds whose prompts of one length, depth and draw hide the same sentences in the same places."""
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

    Needles go between two sentences where there is an end of a sentence within 32 tokens before the place. From the
    same draws, "multikey" and "multiquery" hide the same needles in the same places, and so do "multivalue" and
    "ordinal": their prompts differ behind the last needle only.

    Args:
        kind: "single": one key with one value. "multikey": other keys as well. "multivalue": one key with several
            values, all asked. "multiquery": several keys, all asked. "ordinal": one key with several values, of which
            the first, second, ... or last is asked. "passkey": Landmark Attention's own sentences.
        tokenizer: of the model.
        haystack: token ids, at least `n_tokens`.
        n_tokens: tokens of the prompt, question and template included; None takes the whole haystack.
        depth: place of one needle asked for, from 0, the start, to 1, right before the question or, for a kind with a
            shorter question and reply than the one that shares its needles, as many tokens before it as they are
            shorter.
        n_needles: sentences hidden, at least 2 except for "single" and "passkey", where it is 1.
        rng: draws keys, values and places.
        chat: whether haystack and question are a user's message in the tokenizer's chat template, and the model's
            answer begins with the words that otherwise end the question.
        wording: number of the phrasing in `rope_patch.prompts.wordings`; the same draws are told in other words. The
            filler of a passkey's haystack belongs to it.

    Raises:
        TooFewTokensError: `n_tokens` is too short for needles and question.
        ValueError: the haystack is too short for the prompt.
    """
    frame = Frame.of(tokenizer, chat)
    hidden = _hidden(kind, n_needles, rng, wording)
    depths = _depths(hidden, depth, rng)
    pieces = [tokens_behind(tokenizer, " " + needle) for needle in hidden.needles]
    asked = {k: _asked(k, hidden, wording) for k in about_the_same(kind, n_needles)}
    tails = {k: _tail(tokenizer, frame, chat, of_kind) for k, of_kind in asked.items()}
    taken = len(frame.begin) + len(tails[kind]) + sum(map(len, pieces))
    budget = len(haystack) if n_tokens is None else n_tokens - taken
    if budget < 1:
        raise TooFewTokensError(
            f"{n_tokens} tokens are too few for {len(pieces)} needle(s) and the question of {kind!r}, which take "
            f"{taken}: use a longer length."
        )
    if len(haystack) < budget:
        raise ValueError(f"the haystack has {len(haystack)} tokens, {budget} are needed: give more text.")
    rooms = {k: len(tail) + reply_tokens(k, n_needles) for k, tail in tails.items()}
    # of the kind that leaves the least: places are the same for all
    shared = max(budget + rooms[kind] - max(rooms.values()), 1)
    order = sorted(range(len(pieces)), key=lambda i: depths[i])
    ids, used, position = list(frame.begin), 0, 0
    for i in order:
        place = _sentence_end(tokenizer, haystack, round(depths[i] * shared), at_least=used)
        ids += haystack[used:place]
        used = place
        if i == hidden.asked:
            position = len(ids)
        ids += pieces[i]
    ids += [*haystack[used:budget], *tails[kind]]
    question, beginning, answers = asked[kind]
    answer_ids: list[list[int]] = []
    before = beginning
    for answer in answers:
        goes_on = f", {answer}" if answer_ids else f" {answer}"
        answer_ids.append(tokens_behind(tokenizer, goes_on, before))
        before += goes_on
    graded = [[any(c.isdigit() for c in str(tokenizer.decode([i]))) for i in answer] for answer in answer_ids]
    shown = f"{question} {beginning}".strip()
    return RetrievalPrompt(ids, answers, position, kind == "ordinal", answer_ids, graded, wording, shown)


class _Hidden(NamedTuple):
    """Sentences that are hidden in a text.

    Args:
        needles: the sentences.
        keys: of each, its key; of a passkey "".
        values: of each, its number.
        asked: which of them is at the wanted depth.
        in_order: whether they stand in the text in this order.
    """

    needles: list[str]
    keys: list[str]
    values: list[str]
    asked: int
    in_order: bool


class _Asked(NamedTuple):
    """A question, the beginning of the sentence that answers it, and the answers, in the order of a right reply."""

    question: str
    beginning: str
    answers: list[str]


def _hidden(kind: Kind, n_needles: int, rng: random.Random, wording: int) -> _Hidden:
    if kind == "passkey":
        key = str(rng.randint(10000, 99999))
        return _Hidden([PASSKEY_WORDINGS[wording].needle.format(key=key)], [""], [key], 0, False)
    n = 1 if kind == "single" else n_needles
    if kind == "ordinal" and n > len(_ORDINALS):
        raise ValueError(f"'ordinal' needs n_needles <= {len(_ORDINALS)}, got {n_needles}.")
    one_key = kind in ("multivalue", "ordinal")
    pairs = rng.sample([f"{a}-{b}" for a in _ADJECTIVES for b in _NOUNS], 1 if one_key else n)
    keys = pairs * n if one_key else pairs
    values = [str(v) for v in rng.sample(range(1_000_000, 10_000_000), n)]
    words = NEEDLE_WORDINGS[wording]
    needle = words.one_of if one_key else words.only
    needles = [needle.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    return _Hidden(needles, keys, values, rng.randrange(n) if one_key else 0, one_key)


def _depths(hidden: _Hidden, depth: float, rng: random.Random) -> list[float]:
    """Of each needle; that of the one asked for is `depth`."""
    n = len(hidden.needles)
    if not hidden.in_order:
        return [depth if i == hidden.asked else rng.random() for i in range(n)]
    before = sorted(rng.uniform(0, depth) for _ in range(hidden.asked))
    after = sorted(rng.uniform(depth, 1) for _ in range(n - hidden.asked - 1))
    return [*before, depth, *after]


def _asked(kind: Kind, hidden: _Hidden, wording: int) -> _Asked:
    if kind == "passkey":
        passkey = PASSKEY_WORDINGS[wording]
        return _Asked(passkey.question, passkey.beginning, hidden.values)
    words = NEEDLE_WORDINGS[wording]
    every, be, number, of_keys, answers = "", "is", words.number, hidden.keys[0], hidden.values[:1]
    if kind == "ordinal":
        last = hidden.asked == len(hidden.values) - 1
        number = f"{'last' if last else _ORDINALS[hidden.asked]} {words.number}"
        answers = [hidden.values[hidden.asked]]
    elif kind in ("multivalue", "multiquery"):
        be, number, answers = "are", words.numbers, hidden.values
        if kind == "multivalue":
            every = "all "
        else:
            of_keys = f"{', '.join(hidden.keys[:-1])} and {hidden.keys[-1]}"
    asked = f"the {number} {words.of} {of_keys}"
    question = words.question.format(be=be, asked=every + asked)
    return _Asked(question, words.beginning.format(be=be, asked=asked, Asked=asked.capitalize()), answers)


def _tail(tokenizer: PreTrainedTokenizerBase, frame: Frame, chat: bool, asked: _Asked) -> list[int]:
    """Token ids of what stands behind the haystack."""
    question, beginning, _ = asked
    endings = [question, frame.turn + beginning] if chat else [f"{question} {beginning}"]
    return [i for ending in endings for i in tokens_behind(tokenizer, ending)]


def _sentence_end(tokenizer: PreTrainedTokenizerBase, haystack: Sequence[int], place: int, at_least: int) -> int:
    for end in range(place, max(at_least, place - 32, 0), -1):
        if ends_sentence(tokenizer, haystack[end - 1]):
            return end
    return max(place, at_least)


def ends_sentence(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a token ends with a closing mark or a line break, behind which another sentence can stand."""
    return str(tokenizer.decode([token])).rstrip(" ").endswith((".", "!", "?", "\n"))
