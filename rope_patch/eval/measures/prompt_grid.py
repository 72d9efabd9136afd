"""The prompts of a retrieval grid: every length, depth and trial, in all wordings, made without a model."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...generation.reading import Question, Reply
from ...prompts.asking import ChatTemplate, uses_chat_template
from ...prompts.needles import (
    KINDS,
    Kind,
    RetrievalPrompt,
    TooFewTokensError,
    about_the_same,
    make_prompt,
    reply_tokens,
)
from ...prompts.wordings import N_WORDINGS, PASSKEY_WORDINGS
from ..results.cache import data_hash
from .retrieval_grid import RetrievalGrid

# the middles of ten equal parts, so that each bin of `accuracy_by_answer_position` gets the same number of prompts
DEPTHS = tuple((2 * k + 1) / 20 for k in range(10))
ALL_WORDINGS = tuple(range(N_WORDINGS))

Ask = Callable[[Sequence[Question], Callable[[int], None]], tuple[list[Reply], str]]
"""(questions, function called with the number of answered questions) -> replies, and a sentence about them or ""."""

Haystacks = Sequence[Sequence[int]]
"""Token ids of the text in which needles are hidden: one text for each wording, or one for all."""

_FILLER = ("passkey", "several")  # kinds that are hidden in filler sentences
_DRAWS = 100  # attempts to draw a prompt that differs from the earlier ones


def haystacks_by_kind(
    kinds: Sequence[Kind], tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], lengths: Sequence[int]
) -> dict[Kind, Haystacks]:
    """The haystacks of each kind; the kinds that are hidden in `text` share one."""
    shared = text_haystacks(tokenizer, text, lengths) if set(kinds) - set(_FILLER) else []
    return {kind: passkey_haystacks(tokenizer, lengths) if kind in _FILLER else shared for kind in kinds}


def passkey_haystacks(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]) -> Haystacks:
    """The filler sentences of each wording, repeated up to the longest of `lengths`."""
    fillers = [tokenizer(wording.filler, add_special_tokens=False)["input_ids"] for wording in PASSKEY_WORDINGS]
    return [filler * (max(lengths, default=0) // len(filler) + 1) for filler in fillers]


def text_haystacks(tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], lengths: Sequence[int]) -> Haystacks:
    """Joined documents up to the longest of `lengths`, for all wordings."""
    haystack: list[int] = []
    for document in [text] if isinstance(text, str) else text:
        haystack += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        if len(haystack) >= max(lengths, default=0):
            break
    return [haystack]


def retrieval_prompts(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    length: int,
    *,
    depths: Sequence[float] = DEPTHS,
    trials: int = 2,
    n_needles: int = 4,
    seed: int = 0,
    chat_template: ChatTemplate = "auto",
    wordings: Sequence[int] = ALL_WORDINGS,
) -> list[RetrievalPrompt]:
    """The prompts of one length that `retrieval` asks, depth by depth; arguments as in `retrieval`."""
    grid = PromptGrid(kind, tokenizer, (length,), depths, trials, n_needles, seed, chat_template, tuple(wordings))
    return grid.prompts(length, haystacks_by_kind((kind,), tokenizer, text, (length,))[kind])


def check_retrieval(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    lengths: Sequence[int],
    chat_template: ChatTemplate,
    depths: Sequence[float] = DEPTHS,
) -> None:
    """Raise ValueError if a length is too short for needles and question, or the text too short for a length."""
    haystacks = haystacks_by_kind((kind,), tokenizer, texts, lengths)[kind]
    checked = depths if kind == "several" else (0.5,)
    grid = PromptGrid(kind, tokenizer, lengths, checked, N_WORDINGS, 4, 0, chat_template, ALL_WORDINGS)
    for length in lengths:
        grid.prompts(length, haystacks)


def shortest_prompt(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: ChatTemplate,
    *,
    n_needles: int = 4,
    depths: Sequence[float] = DEPTHS,
) -> int:
    """Tokens of the shortest prompt of this kind and its reply: the longest wording, with one sentence of haystack."""
    grid = PromptGrid(kind, tokenizer, (0,), depths, 1, n_needles, 0, chat_template, ALL_WORDINGS)
    sentence = tokenizer(PASSKEY_WORDINGS[0].filler, add_special_tokens=False)["input_ids"]
    prompts = [
        grid.make(sentence, None, 0.5, trial % N_WORDINGS, random.Random(trial)) for trial in range(4 * N_WORDINGS)
    ]
    return grid.new_tokens + max(len(prompt.ids) for prompt in prompts)


@dataclass(frozen=True)
class PromptGrid:
    """The prompts of one kind: lengths x depths x trials; arguments as in `retrieval`."""

    kind: Kind
    tokenizer: PreTrainedTokenizerBase
    lengths: Sequence[int]
    depths: Sequence[float]
    trials: int
    n_needles: int
    seed: int
    chat_template: ChatTemplate
    wordings: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if not all(0 <= d <= 1 for d in self.depths):
            raise ValueError(f"depths must be in [0, 1], got {list(self.depths)}.")

    @property
    def hidden(self) -> int:
        """Number of hidden sentences: "passkey" and "single" always have one, "several" one at each depth."""
        if self.kind == "several":
            return len(self.depths)
        return 1 if self.kind in ("passkey", "single") else self.n_needles

    @property
    def texts(self) -> int:
        """Texts of one length: "several" asks about one text at all depths, other kinds about a text a prompt."""
        return self.trials if self.kind == "several" else self.trials * len(self.depths)

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens of a reply."""
        return reply_tokens(self.kind, self.hidden)

    def make(
        self, haystack: Sequence[int], n_tokens: int | None, depth: float, wording: int, rng: random.Random
    ) -> RetrievalPrompt:
        """One prompt of `n_tokens`, or of the whole haystack with None."""
        return make_prompt(
            self.kind,
            self.tokenizer,
            haystack,
            n_tokens=n_tokens,
            depth=depth,
            n_needles=self.hidden,
            rng=rng,
            chat=uses_chat_template(self.tokenizer, self.chat_template),
            wording=wording,
        )

    def prompts(self, length: int, haystacks: Haystacks) -> list[RetrievalPrompt]:
        """All prompts of one length, depth by depth: all different, and equally many in each wording.

        They depend on the tokenizer and not on the model: the k-th prompt of two models is the same.
        """
        prompts: dict[tuple[int, ...], RetrievalPrompt] = {}  # by token ids
        # kinds that ask about the same needles draw them alike, so that they share their texts
        drawn_as, one_text = about_the_same(self.kind, self.hidden)[0], self.kind == "several"
        for depth in self.depths:
            for trial in range(self.trials):
                # wordings take turns through depths and trials, so each is asked at all depths
                wording = self.wordings[(trial if one_text else len(prompts)) % len(self.wordings)]
                haystack = haystacks[wording % len(haystacks)]
                drawn = f"{self.seed} {drawn_as} {length} {'' if one_text else depth} {trial}"
                for attempt in range(_DRAWS):
                    rng = random.Random(f"{drawn} {attempt}" if attempt else drawn)
                    try:
                        prompt = self.make(haystack, length - self.new_tokens, depth, wording, rng)
                    except TooFewTokensError as error:
                        least = shortest_prompt(
                            self.kind,
                            self.tokenizer,
                            self.chat_template,
                            n_needles=self.n_needles,
                            depths=self.depths,
                        )
                        raise ValueError(
                            f"{length} tokens are too few for the needles, the question and the reply of "
                            f"{self.kind!r}: use lengths of at least {least}."
                        ) from error
                    if tuple(prompt.ids) not in prompts:
                        break
                else:
                    raise ValueError(
                        f"there are no {self.trials} different prompts of {length} tokens: use fewer trials."
                    )
                prompts[tuple(prompt.ids)] = prompt
        return list(prompts.values())

    def part(self, length: int, prompts: Sequence[RetrievalPrompt], replies: Sequence[Reply]) -> dict[str, Any]:
        """The stored result of one length."""
        texts = self.tokenizer.batch_decode([reply.written for reply in replies], skip_special_tokens=True)
        scores = [p.score(text) for p, text in zip(prompts, texts, strict=True)]
        wordings = [p.wording for p in prompts]
        # indices of the replies that the report shows: one of each wording, at depths that differ, or a text's
        shown = [
            min(
                (i for i, w in enumerate(wordings) if w == wording),
                key=lambda i, k=k: abs(i / len(prompts) - (k + 0.5) / len(self.wordings)),  # type: ignore[misc]
            )
            for k, wording in enumerate(self.wordings)
            if wording in wordings
        ]
        if self.kind == "several":
            shown = list(range(0, len(prompts), self.trials))
        return {
            "scores": scores,
            "forced_scores": [p.forced_score(reply.forced) for p, reply in zip(prompts, replies, strict=True)],
            "places": [p.position / len(p.ids) for p in prompts],
            "wordings": wordings,
            "prompt_hash": data_hash([p.ids for p in prompts]),
            "replies": [
                {
                    "length": length,
                    "wording": wordings[i],
                    "question": prompts[i].question,
                    "expected": ", ".join(prompts[i].answers),
                    "reply": texts[i],
                    "score": scores[i],
                }
                for i in shown
            ],
        }

    def grid(self, parts: Sequence[Mapping[str, Any]]) -> RetrievalGrid:
        """The result of all lengths, from the stored result of each."""

        def joined(name: str) -> list[Any]:
            return [value for part in parts for value in part[name]]

        n = self.trials
        return RetrievalGrid(
            self.kind,
            list(self.lengths),
            list(self.depths),
            [[sum(p["scores"][k : k + n]) / n for k in range(0, len(p["scores"]), n)] for p in parts],
            n,
            places=joined("places"),
            scores=joined("scores"),
            wordings=joined("wordings"),
            prompt_hashes=[part["prompt_hash"] for part in parts],
            replies=joined("replies"),
            forced_scores=joined("forced_scores"),
            said=joined("said"),
        )
