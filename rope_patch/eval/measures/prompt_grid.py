"""The prompts of a retrieval grid: every length, depth and trial, in all wordings, without a model."""

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

# the middles of ten equal parts, so that `accuracy_by_answer_position` finds as many prompts in each of its bins
DEPTHS = tuple((2 * k + 1) / 20 for k in range(10))

Ask = Callable[[Sequence[Question], Callable[[int], None]], tuple[list[Reply], str]]
"""(questions, what is told how many are read) -> replies, and a sentence about who gave them or ""."""


ALL_WORDINGS = tuple(range(N_WORDINGS))


_DRAWS = 100  # of one prompt, until it is none of those before


# token ids of the text that needles are hidden in: of each wording, or one for all
Haystacks = Sequence[Sequence[int]]


def needles_of(kind: Kind, n_needles: int) -> int:
    """Sentences hidden in a prompt: "passkey" and "single" have one, whatever was asked for."""
    return 1 if kind in ("passkey", "single") else n_needles


def haystacks_of(
    kinds: Sequence[Kind], tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], lengths: Sequence[int]
) -> dict[Kind, Haystacks]:
    """The haystacks of each kind; the text is tokenized once for all kinds that are hidden in it."""
    of_text = text_haystacks(tokenizer, text, lengths) if set(kinds) - {"passkey"} else []
    return {kind: passkey_haystacks(tokenizer, lengths) if kind == "passkey" else of_text for kind in kinds}


def passkey_haystacks(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]) -> Haystacks:
    """Each wording's filler sentences, repeated until they are enough for the longest of `lengths`."""
    fillers = [tokenizer(wording.filler, add_special_tokens=False)["input_ids"] for wording in PASSKEY_WORDINGS]
    return [filler * (max(lengths, default=0) // len(filler) + 1) for filler in fillers]


def text_haystacks(tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], lengths: Sequence[int]) -> Haystacks:
    """Documents, one after the other, until they are enough for the longest of `lengths`, for all wordings."""
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
    """What `retrieval` asks at one length, depth by depth, without a model; arguments as there."""
    haystacks = haystacks_of((kind,), tokenizer, text, (length,))[kind]
    needles = needles_of(kind, n_needles)
    prompts = PromptGrid(kind, tokenizer, (length,), depths, trials, needles, seed, chat_template, tuple(wordings))
    return prompts.of_length(length, haystacks)


def check_retrieval(
    kind: Kind,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    lengths: Sequence[int],
    chat_template: ChatTemplate,
    *,
    n_needles: int = 4,
) -> None:
    """Make one prompt of each length and wording, without a model.

    Raises:
        ValueError: a length that is too short for needles and question, or a text that is too short for the length.
    """
    haystack = haystacks_of((kind,), tokenizer, texts, lengths)[kind]
    n_needles = needles_of(kind, n_needles)
    trials = len(ALL_WORDINGS)
    prompts = PromptGrid(kind, tokenizer, lengths, (0.5,), trials, n_needles, 0, chat_template, ALL_WORDINGS)
    for length in lengths:
        prompts.of_length(length, haystack)


def shortest_prompt(
    kind: Kind, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate, *, n_needles: int = 4
) -> int:
    """Tokens that a prompt of this kind takes at least, in its longest wording and with a sentence of haystack."""
    n_needles = needles_of(kind, n_needles)
    prompts = PromptGrid(kind, tokenizer, (0,), (0.5,), 1, n_needles, 0, chat_template, ALL_WORDINGS)
    chat = uses_chat_template(tokenizer, chat_template)
    sentence = tokenizer(PASSKEY_WORDINGS[0].filler, add_special_tokens=False)["input_ids"]
    return prompts.new_tokens + max(
        len(
            make_prompt(
                kind,
                tokenizer,
                sentence,
                n_tokens=None,
                depth=0.5,
                n_needles=n_needles,
                rng=random.Random(trial),
                chat=chat,
                wording=trial % N_WORDINGS,
            ).ids
        )
        for trial in range(4 * N_WORDINGS)
    )


@dataclass(frozen=True)
class PromptGrid:
    """The prompts of a grid; arguments as in `retrieval`."""

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
    def new_tokens(self) -> int:
        """Tokens that a reply may have."""
        return reply_tokens(self.kind, self.n_needles)

    def of_length(self, length: int, haystacks: Haystacks) -> list[RetrievalPrompt]:
        """All prompts of one length, depth by depth, each another one, in each wording as often as in the others.

        They do not depend on the model, only on its tokenizer: the k-th prompt of two models is the same.

        Raises:
            ValueError: `length` is too short for needles, question and reply.
        """
        seen: set[tuple[int, ...]] = set()
        prompts: list[RetrievalPrompt] = []
        for depth in self.depths:
            for trial in range(self.trials):
                # in turn through depths and trials: each wording is asked at all depths
                wording = self.wordings[len(prompts) % len(self.wordings)]
                try:
                    prompt = self._drawn(length, depth, trial, wording, haystacks[wording % len(haystacks)], seen)
                except TooFewTokensError as error:
                    least = shortest_prompt(self.kind, self.tokenizer, self.chat_template, n_needles=self.n_needles)
                    raise ValueError(
                        f"{length} tokens are too few for the needles, the question and the reply of {self.kind!r}: "
                        f"use lengths of at least {least}."
                    ) from error
                seen.add(tuple(prompt.ids))
                prompts.append(prompt)
        return prompts

    def _drawn(
        self, length: int, depth: float, trial: int, wording: int, haystack: Sequence[int], seen: set[tuple[int, ...]]
    ) -> RetrievalPrompt:
        drawn_as = about_the_same(self.kind, self.n_needles)[0]
        drawn = f"{self.seed} {drawn_as} {length} {depth} {trial}"
        for again in range(_DRAWS):
            prompt = make_prompt(
                self.kind,
                self.tokenizer,
                haystack,
                n_tokens=length - self.new_tokens,
                depth=depth,
                n_needles=self.n_needles,
                rng=random.Random(f"{drawn} {again}" if again else drawn),
                chat=uses_chat_template(self.tokenizer, self.chat_template),
                wording=wording,
            )
            if tuple(prompt.ids) not in seen:
                return prompt
        raise ValueError(f"there are no {self.trials} different prompts of {length} tokens: ask for fewer trials.")

    def part(self, length: int, prompts: Sequence[RetrievalPrompt], replies: Sequence[Reply]) -> dict[str, Any]:
        """What is kept of one length."""
        texts = self.tokenizer.batch_decode([reply.written for reply in replies], skip_special_tokens=True)
        return {
            "scores": [p.score(text) for p, text in zip(prompts, texts, strict=True)],
            "forced_scores": [p.forced_score(reply.forced) for p, reply in zip(prompts, replies, strict=True)],
            "places": [p.position / len(p.ids) for p in prompts],
            **self._record(length, prompts, texts),
        }

    def _record(self, length: int, prompts: Sequence[RetrievalPrompt], replies: Sequence[str]) -> dict[str, Any]:
        """What is kept of one length beside scores and places."""
        wordings = [p.wording for p in prompts]
        # of each wording one, from all depths
        shown = [
            min(
                (i for i, w in enumerate(wordings) if w == wording),
                key=lambda i, k=k: abs(i / len(prompts) - (k + 0.5) / len(self.wordings)),  # type: ignore[misc]
            )
            for k, wording in enumerate(self.wordings)
            if wording in wordings
        ]
        return {
            "wordings": wordings,
            "prompt_hash": data_hash([p.ids for p in prompts]),
            "replies": [
                {
                    "length": length,
                    "wording": prompts[i].wording,
                    "question": prompts[i].question,
                    "expected": ", ".join(prompts[i].answers),
                    "reply": replies[i],
                    "score": prompts[i].score(replies[i]),
                }
                for i in shown
            ],
        }

    def grid(self, parts: Sequence[Mapping[str, Any]]) -> RetrievalGrid:
        """Of what was kept of each length."""
        return RetrievalGrid(
            self.kind,
            list(self.lengths),
            list(self.depths),
            [
                [
                    sum(part["scores"][k : k + self.trials]) / self.trials
                    for k in range(0, len(part["scores"]), self.trials)
                ]
                for part in parts
            ],
            self.trials,
            places=[place for part in parts for place in part["places"]],
            scores=[score for part in parts for score in part["scores"]],
            wordings=[wording for part in parts for wording in part["wordings"]],
            prompt_hashes=[part["prompt_hash"] for part in parts],
            replies=[reply for part in parts for reply in part["replies"]],
            forced_scores=[score for part in parts for score in part["forced_scores"]],
            said=[sentence for part in parts for sentence in part["said"]],
        )
