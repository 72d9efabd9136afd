"""Measures that ask questions: whoever gives the prompts gets the measure, with page, figure, table and intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers import PreTrainedTokenizerBase

from ...generation.generation import greedy_answers
from ..results.cache import data_hash
from ..results.figures import Figure, line_figure
from ..results.progress import token_bar
from ..results.result import Pairs, Result
from .base import Job, Measure

if TYPE_CHECKING:
    from ..suite import EvalPlan

_SHOWN = 4  # replies of each length that are stored


@dataclass(frozen=True)
class Prompt:
    """A prompt and what a right reply holds. Derive from it to score replies in another way.

    Args:
        ids: token IDs.
        answers: strings; the score of a reply is the share of them that it holds.
        question: end of the prompt, which the report shows.
    """

    ids: Sequence[int]
    answers: Sequence[str]
    question: str

    def score(self, reply: str) -> float:
        """Score of a reply, from 0 to 1."""
        return sum(answer in reply for answer in self.answers) / len(self.answers)


Prompts = Callable[["EvalPlan", PreTrainedTokenizerBase, list[str], int], Sequence[Prompt]]
"""(plan, tokenizer, held-out documents, tokens of a prompt) -> prompts, the same each time."""


@dataclass(frozen=True)
class Answers(Result):
    """Scores of replies by length.

    Args:
        measure: name of the measure.
        lengths: tokens of a prompt and its reply together.
        by_prompt: [n_lengths][n_prompts], score of each prompt, 0 to 1.
        prompt_hashes: [n_lengths], hash of all prompts of a length. Two models with the same hash got the same prompts.
        replies: some replies of each length, as {length, question, expected, reply, score}.
    """

    title: ClassVar[str] = "Answers: {measure}"
    column: ClassVar[str] = "score"

    measure: str
    lengths: list[int]
    by_prompt: list[list[float]]
    prompt_hashes: list[str]
    replies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def by_length(self) -> dict[int, float]:
        """Mean score at each length."""
        return {n: sum(scores) / len(scores) for n, scores in zip(self.lengths, self.by_prompt, strict=True)}

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        of_first = dict(zip(first.lengths, zip(first.by_prompt, first.prompt_hashes, strict=True), strict=True))
        return [
            Pairs(of_first[n][0], scores, "prompts", n, same=of_first[n][1] == prompt_hash)
            for n, scores, prompt_hash in zip(self.lengths, self.by_prompt, self.prompt_hashes, strict=True)
            if n in of_first
        ]

    def headline(self) -> dict[str, float]:
        return {f"{self.measure} at {n}": score for n, score in self.by_length.items()}

    def table(self) -> list[dict[str, Any]]:
        n_prompts = map(len, self.by_prompt)
        return [
            {"length": n, "score": score, "prompts": k}
            for (n, score), k in zip(self.by_length.items(), n_prompts, strict=True)
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        curves = {label: (r.lengths, [*r.by_length.values()]) for label, r in results.items()}
        name = next(iter(results.values())).measure
        return line_figure(
            curves, marker="o", title=name, xlabel="length (tokens)", ylabel="mean score", ylim=(-0.02, 1.02)
        )[0]

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        means = {k: [f"{100 * s:.0f} % at {n} tokens" for n, s in r.by_length.items()] for k, r in results.items()}
        return [f"{label}: {', '.join(of)}." for label, of in means.items()]


def asking(
    name: str,
    prompts: Prompts,
    *,
    new_tokens: int,
    settings: tuple[str, ...] = ("trials",),
    **declared: Any,
) -> Measure:
    """A measure that asks each model the same prompts, and scores its greedy replies.

    What is stored goes by the prompts, so that other settings, files or code that change them are measured anew.

    Args:
        name: of the measure.
        prompts: makes the prompts of a length. It runs before a model is loaded, too, so that what it raises stops no
            run half way.
        new_tokens: most tokens of a reply. A prompt has as many fewer than its length.
        settings: () if `EvalPlan.trials` does not set the number of prompts.
        **declared: further fields of `Measure`, such as help and options.
    """

    def asked(plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict[int, Sequence[Prompt]]:
        return {n: prompts(plan, tokenizer, texts, n - new_tokens) for n in plan.lengths}

    def run(job: Job) -> Answers:
        result = Answers(name, [], [], [])
        for n, of_length in asked(job.plan, job.tokenizer, job.texts).items():
            hashed = data_hash([(list(p.ids), p.answers) for p in of_length])
            measure = partial(_measured, job, of_length, n, new_tokens)
            stored = job.remember({"length": n, "prompts": hashed, "new_tokens": new_tokens}, measure)
            result.lengths.append(n)
            result.by_prompt.append(stored["scores"])
            result.prompt_hashes.append(hashed)
            result.replies.extend(stored["replies"])
        return result

    def check(plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
        asked(plan, tokenizer, texts)

    return Measure(
        name=name,
        result=Answers,
        run=run,
        check=check,
        whole=False,
        settings=settings,
        **{"asks": True, **declared},
    )


def _measured(job: Job, asked: Sequence[Prompt], length: int, new_tokens: int) -> dict[str, Any]:
    """The stored result of one length."""
    with token_bar(job.model, len(asked) * length, f"{job.name} at {length}", show=True) as done:
        replies = greedy_answers(
            job.model,
            job.tokenizer,
            [prompt.ids for prompt in asked],
            max_new_tokens=new_tokens,
            batch_size=job.plan.batch_size,
            done=lambda n: done(n * length),
        )
    scores = [prompt.score(reply) for prompt, reply in zip(asked, replies, strict=True)]
    shown = [
        {
            "length": length,
            "question": prompt.question,
            "expected": ", ".join(prompt.answers),
            "reply": reply,
            "score": score,
        }
        for prompt, reply, score in zip(asked[:_SHOWN], replies, scores, strict=False)
    ]
    return {"scores": scores, "replies": shown}
