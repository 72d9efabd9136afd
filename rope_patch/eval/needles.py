"""Retrieval prompts: sentences to be found again, hidden in running text at chosen depths."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from .asking import Frame
from .wordings import N_WORDINGS, NEEDLE_WORDINGS, PASSKEY_WORDINGS

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
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class RetrievalPrompt:
    """One prompt and what counts as its answer.

    Args:
        ids: token ids of the prompt, of exactly the length asked for less the tokens to be generated.
        answers: strings to be found; the score is the share found.
        position: token index at which the needle of the first answer starts.
        first_number_only: whether only the first number of the reply counts, because other values of the same key are
            in the text as well.
        wording: number of its phrasing in `rope_patch.eval.wordings`.
        question: what is asked, up to where the model goes on.
    """

    ids: list[int]
    answers: list[str]
    position: int
    first_number_only: bool
    wording: int = 0
    question: str = ""

    def score(self, reply: str) -> float:
        """Share of `answers` in `reply`."""
        if self.first_number_only:
            numbers = "".join(c if c.isdigit() else " " for c in reply).split()
            return float(bool(numbers) and numbers[0] == self.answers[0])
        return sum(answer in reply for answer in self.answers) / len(self.answers)


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

    Needles go between two sentences where there is an end of a sentence within 32 tokens before the place.

    Args:
        kind: "single": one key with one value. "multikey": other keys as well. "multivalue": one key with several
            values, all asked. "multiquery": several keys, all asked. "ordinal": one key with several values, of which
            the first, second, ... or last is asked. "passkey": Landmark Attention's own sentences.
        tokenizer: of the model.
        haystack: token ids, at least `n_tokens`.
        n_tokens: tokens of the prompt, question and template included; None takes the whole haystack.
        depth: place of the (first) needle asked for, from 0, the start, to 1, right before the question.
        n_needles: sentences hidden, at least 2 except for "single" and "passkey", where it is 1.
        rng: draws keys, values and places.
        chat: whether haystack and question are a user's message in the tokenizer's chat template, and the model's
            answer begins with the words that otherwise end the question.
        wording: number of the phrasing in `rope_patch.eval.wordings`; the same draws are told in other words. The
            filler of a passkey's haystack belongs to it.

    Raises:
        ValueError: an unknown wording, or the prompt is too short for needles and question, or the haystack for the
            prompt.
    """
    if not 0 <= wording < N_WORDINGS:
        raise ValueError(f"wording must be from 0 to {N_WORDINGS - 1}, got {wording}.")
    frame = Frame.of(tokenizer, chat)
    needles, question, beginning, answers = _sentences(kind, n_needles, rng, wording)
    asked = next(i for i, needle in enumerate(needles) if answers[0] in needle)
    if kind == "ordinal":  # their order in the text is what is asked
        before = sorted(rng.uniform(0, depth) for _ in range(asked))
        after = sorted(rng.uniform(depth, 1) for _ in range(len(needles) - asked - 1))
        depths = [*before, depth, *after]
    else:
        depths = [depth if i == asked else rng.random() for i in range(len(needles))]
    pieces = [tokenizer(" " + needle, add_special_tokens=False)["input_ids"] for needle in needles]
    endings = [question, frame.turn + beginning] if chat else [f"{question} {beginning}"]
    tail: list[int] = [i for ending in endings for i in tokenizer(ending, add_special_tokens=False)["input_ids"]]
    taken = len(frame.begin) + len(tail) + sum(map(len, pieces))
    budget = len(haystack) if n_tokens is None else n_tokens - taken
    if budget < 1:
        raise ValueError(
            f"{n_tokens} tokens are too few for {len(needles)} needle(s) and the question of {kind!r}, which take "
            f"{taken}: use a longer length."
        )
    if len(haystack) < budget:
        raise ValueError(f"the haystack has {len(haystack)} tokens, {budget} are needed: give more text.")
    order = sorted(range(len(pieces)), key=lambda i: depths[i])
    ids, used, position = list(frame.begin), 0, 0
    for i in order:
        place = _sentence_end(tokenizer, haystack, round(depths[i] * budget), at_least=used)
        ids += haystack[used:place]
        used = place
        if i == asked:
            position = len(ids)
        ids += pieces[i]
    ids += [*haystack[used:budget], *tail]
    shown = f"{question} {beginning}".strip()
    return RetrievalPrompt(ids, answers, position, kind == "ordinal", wording, shown)


def _sentences(kind: Kind, n_needles: int, rng: random.Random, wording: int) -> tuple[list[str], str, str, list[str]]:
    """Needles, question, the beginning of the sentence that answers it, and the answers."""
    if kind == "passkey":
        key = str(rng.randint(10000, 99999))
        passkey = PASSKEY_WORDINGS[wording]
        return [passkey.needle.format(key=key)], passkey.question, passkey.beginning, [key]
    n = 1 if kind == "single" else n_needles
    if kind != "single" and n < 2:
        raise ValueError(f"{kind!r} needs n_needles >= 2, got {n_needles}.")
    one_key = kind in ("multivalue", "ordinal")
    pairs = rng.sample([f"{a}-{b}" for a in _ADJECTIVES for b in _NOUNS], 1 if one_key else n)
    keys = pairs * n if one_key else pairs
    values = [str(v) for v in rng.sample(range(1_000_000, 10_000_000), n)]
    words = NEEDLE_WORDINGS[wording]
    needle = words.only if kind in ("single", "multikey") else words.one_of
    needles = [needle.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    every, be, of_keys = "", "is", keys[0]
    if kind in ("single", "multikey"):
        number, answers = words.number, values[:1]
    elif kind == "ordinal":
        if n > len(_ORDINALS):
            raise ValueError(f"'ordinal' needs n_needles <= {len(_ORDINALS)}, got {n_needles}.")
        which = rng.randrange(n)
        number = f"{'last' if which == n - 1 else _ORDINALS[which]} {words.number}"
        answers = [values[which]]
    else:
        number, be, answers = words.numbers, "are", values
        if kind == "multivalue":
            every = "all "
        else:
            of_keys = f"{', '.join(keys[:-1])} and {keys[-1]}"
    asked = f"the {number} {words.of} {of_keys}"
    question = words.question.format(be=be, asked=every + asked)
    return needles, question, words.beginning.format(be=be, asked=asked, Asked=asked.capitalize()), answers


def _sentence_end(tokenizer: PreTrainedTokenizerBase, haystack: Sequence[int], place: int, at_least: int) -> int:
    for end in range(place, max(at_least, place - 32, 0), -1):
        if ends_sentence(tokenizer, haystack[end - 1]):
            return end
    return max(place, at_least)


def ends_sentence(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a token ends with a closing mark or a line break, behind which another sentence can stand."""
    return str(tokenizer.decode([token])).rstrip(" ").endswith((".", "!", "?", "\n"))
