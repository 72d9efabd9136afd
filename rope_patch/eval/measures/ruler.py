"""RULER's 13 tasks, with the prompts, the metrics and the chat templates of lm-eval."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...prompts.asking import ChatTemplate, uses_chat_template
from ..results.cache import Remember, afresh
from ..results.figures import Figure, add_legend, compact, draw_bars, new_figure
from ..results.progress import token_bar
from ..results.result import Pairs, Result
from .answer_positions import AnswerPositionAccuracy, accuracy_by_answer_position, draw_by_place
from .base import Job, Measure
from .harness import evaluate, local_task, quiet, require_lm_eval, sample_scores
from .retrieval_grid import RetrievalGrid
from .ruler_prompts import SHORTEST_LENGTH, RulerPrompts, require_haystack, ruler_prompts

if TYPE_CHECKING:
    from ..suite import EvalPlan

# most tokens of a reply, as lm-eval's task files have them
_NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
# of the prompts of tasks that are asked in one call: a killed run loses no more
_TOKENS_AT_ONCE = 1 << 22
_SHOWN = 200  # characters at the end of a prompt that are stored with its reply: its question


@dataclass(frozen=True)
class Ruler(Result):
    """RULER scores by task and length.

    Args:
        lengths: tokens of a prompt and its answer together.
        scores: task -> [n_lengths], mean score, 0 to 1.
        samples: most prompts of a task and length.
        answer_positions: accuracy of niah_multikey_2 by the position of the answer, one curve of
            `AnswerPositionAccuracy` for each length; empty without that task.
        prompt_scores: task -> [n_lengths][n_prompts], score of each prompt.
        replies: one reply of each task and length, as {task, length, question, expected, reply, score}.
    """

    title: ClassVar[str] = "RULER"
    column: ClassVar[str] = "score"

    lengths: list[int]
    scores: dict[str, list[float]]
    samples: int
    answer_positions: list[dict[str, Any]]
    prompt_scores: dict[str, list[list[float]]] = field(default_factory=dict)
    replies: list[dict[str, Any]] = field(default_factory=list)

    def mean(self, length: int) -> float:
        """Unweighted mean over tasks at one length."""
        k = self.lengths.index(length)
        return sum(values[k] for values in self.scores.values()) / len(self.scores)

    def n_prompts(self, task: str, length: int) -> int:
        """Number of scored prompts, which is less than of other tasks if a file has fewer questions."""
        return len(self.prompt_scores[task][self.lengths.index(length)])

    @property
    def by_answer_position(self) -> AnswerPositionAccuracy:
        """Accuracy of niah_multikey_2 by the position of the answer, one curve for each length."""
        return AnswerPositionAccuracy(self.answer_positions)

    def headline(self) -> dict[str, float]:
        return {f"RULER at {n}": self.mean(n) for n in self.lengths}

    def table(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"task": task, "length": n, "score": value, "samples": self.n_prompts(task, n)}
            for task, values in self.scores.items()
            for n, value in zip(self.lengths, values, strict=True)
        ]
        for n in self.lengths:
            n_prompts = sum(self.n_prompts(task, n) for task in self.scores)
            rows.append({"task": "mean", "length": n, "score": self.mean(n), "samples": n_prompts})
        return rows

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        return [
            Pairs(
                scores,
                self.prompt_scores[task][self.lengths.index(n)],
                "prompts",
                n,
                task,
                sentence=f"RULER's {task} at {n} tokens: the score is {{}}",
            )
            for task in first.prompt_scores
            if task in self.prompt_scores
            for n, scores in zip(first.lengths, first.prompt_scores[task], strict=True)
            if n in self.lengths
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        first = next(iter(results.values()))
        n_lengths, by_position = len(first.lengths), bool(first.answer_positions)
        figure, all_axes = new_figure(
            n_lengths, height=6.5 if by_position else 5.0, row_heights=(3, 1.5) if by_position else (1,)
        )
        for k, length in enumerate(first.lengths):
            axes = all_axes[k]
            series = {label: [*(v[k] for v in r.scores.values()), r.mean(length)] for label, r in results.items()}
            draw_bars(axes, [*(t.removeprefix("ruler_").removeprefix("niah_") for t in first.scores), "mean"], series)
            axes.set(title=f"{compact(length)} tokens")
            axes.set_ylim(0, 1)
            axes.tick_params(axis="x", labelsize=6, rotation=90)
        all_axes[0].set_ylabel("score")
        if by_position:
            below = all_axes[n_lengths:]
            for label, result in results.items():
                for axes, curve in zip(below, result.answer_positions, strict=False):
                    draw_by_place(axes, curve, label)
            below[0].set_ylabel("multikey_2 by position\nof the answer")
        add_legend(figure, all_axes[0])
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = []
        for label, result in results.items():
            means = ", ".join(f"{100 * result.mean(n):.1f} at {n}" for n in result.lengths)
            worst = min(result.scores, key=lambda t: result.scores[t][-1])
            sentences.append(
                f"{label}: mean {means} tokens. The weakest task at {result.lengths[-1]} tokens is {worst} "
                f"({100 * result.scores[worst][-1]:.0f})."
            )
            sentences += result.by_answer_position.gaps(label)
        return sentences


def ruler(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: RulerPrompts,
    *,
    batch_size: int | None = None,
    chat_template: ChatTemplate = "auto",
    progress: bool = True,
    remember: Remember = afresh,
) -> Ruler:
    """Score RULER's tasks with lm-eval's prompts and metrics, and no prompt truncated.

    Args:
        model: a causal LM.
        tokenizer: tokenizer of the model.
        prompts: from `ruler_prompts`, so that several models get the same ones.
        batch_size: maximum number of prompts in memory and answered at once; None means 8 GiB of keys and values.
        chat_template: that of the prompts.
        progress: whether to show a bar over tasks and lengths.
        remember: stores each task and length as soon as it is done.

    Raises:
        ImportError: lm-eval is not installed.

    Source: RULER, arXiv:2404.06654.
    """
    require_lm_eval()
    chat = uses_chat_template(tokenizer, chat_template)
    lengths = list(dict.fromkeys(length for length, _ in prompts))
    chosen = list(dict.fromkeys(task for _, task in prompts))
    samples = max(map(len, prompts.values()))
    result = Ruler(lengths, {task: [] for task in chosen}, samples, [], {task: [] for task in chosen}, [])
    for length in lengths:
        at_once = tasks_at_once(length, samples)
        for first in range(0, len(chosen), at_once):
            together = {task: prompts[length, task] for task in chosen[first : first + at_once]}
            measured: dict[str, dict[str, Any]] = {}

            # all together, also what is stored, so that the same prompts are answered beside each other
            def cell(task: str, together: Any = together, measured: Any = measured, n: int = length) -> dict[str, Any]:
                if not measured:
                    measured.update(_measure(model, tokenizer, together, n, batch_size, chat, progress))
                value: dict[str, Any] = measured[task]
                return value

            for task in together:
                value = remember({"task": task, "length": length}, partial(cell, task))
                result.scores[task].append(value["score"])
                result.prompt_scores[task].append(value["scores"])
                result.replies.append(value["reply"])
                if value["answer_positions"] is not None:
                    result.answer_positions.append(value["answer_positions"])
    return result


def tasks_at_once(length: int, samples: int) -> int:
    """Tasks that are asked together, where each has `samples` prompts of `length` tokens."""
    return max(_TOKENS_AT_ONCE // (length * samples), 1)


def _measure(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    documents: Mapping[str, list[dict[str, Any]]],
    length: int,
    batch_size: int | None,
    chat: bool,
    progress: bool,
) -> dict[str, dict[str, Any]]:
    """Task -> its stored result at one length; all tasks are asked in one call."""
    tasks = [_task(name, of_task) for name, of_task in documents.items()]
    n_prompts = sum(map(len, documents.values()))
    with token_bar(model, length * n_prompts, f"RULER at {length}", show=progress):
        found = evaluate(
            model,
            tokenizer,
            tasks,
            batch_size=batch_size,
            max_length=length + max(_NEW_TOKENS.values()),
            chat=chat,
            greedy=True,
        )
    return {
        name: _stored(name, length, metrics["score"], logged)
        for name, (metrics, logged) in zip(documents, found, strict=True)
    }


def _task(name: str, documents: list[dict[str, Any]]) -> Any:
    """lm-eval's task on these documents."""
    with quiet():
        from lm_eval.tasks.ruler import common_utils

        metric = common_utils.string_match_part if "qa" in name else common_utils.string_match_all

        def score(doc: dict[str, Any], replies: list[str]) -> dict[str, float]:
            return {"score": metric(common_utils.postprocess_pred(replies), [doc["outputs"]])}

        return local_task(
            name,
            documents,
            "test",
            folder="ruler",
            process_results=score,
            # lm-eval's tasks have a metric for each of a fixed list of lengths, -1 where nothing was measured
            metric_list=[{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
            generation_kwargs={
                "do_sample": False,
                "temperature": 0.0,
                "max_gen_toks": _NEW_TOKENS[name.removeprefix("ruler_").partition("_")[0]],
                "until": [],
            },
        )


def _stored(task: str, length: int, score: float, logged: list[dict[str, Any]]) -> dict[str, Any]:
    """The stored result of one task and length, from lm-eval's log of its samples."""
    curve = None
    if task == "niah_multikey_2":
        # in characters, where our own prompts count tokens
        places = [s["doc"]["input"].index(s["doc"]["outputs"][0]) / len(s["doc"]["input"]) for s in logged]
        scores = [s["score"] for s in logged]
        grid = RetrievalGrid(task, [length], [0.5], [scores], len(scores), places, scores)
        curve = accuracy_by_answer_position(grid).curves[0]
    first = min(logged, key=lambda s: s["doc_id"])
    return {
        "score": score,
        "answer_positions": curve,
        "scores": sample_scores(logged, "score"),
        "reply": {
            "task": task,
            "length": length,
            "question": first["doc"]["input"][-_SHOWN:],
            "expected": ", ".join(map(str, first["doc"]["outputs"])),
            "reply": first["resps"][0][0],
            "score": float(first["score"]),
        },
    }


def _prompt_options(plan: "EvalPlan", texts: list[str]) -> dict[str, Any]:
    """The arguments of `ruler_prompts` that choose prompts."""
    return {
        "tasks": plan.ruler_tasks,
        "haystack": "\n".join(texts),
        "squad": plan.squad,
        "hotpotqa": plan.hotpotqa,
        "chat_template": plan.chat_template,
        "seed": plan.seed,
    }


def _measured(job: Job) -> Ruler:
    plan = job.plan
    lengths = plan.ruler_lengths or plan.lengths

    def make() -> dict[str, Any]:
        made = ruler_prompts(job.tokenizer, lengths, samples=plan.ruler_samples, **_prompt_options(plan, job.texts))
        return {"cells": [[*cell, documents] for cell, documents in made.items()]}

    kept = job.for_all_models({"prompts": lengths, "tasks": plan.ruler_tasks}, make)
    return ruler(
        job.model,
        job.tokenizer,
        {(length, task): documents for length, task, documents in kept["cells"]},
        batch_size=plan.batch_size,
        chat_template=plan.chat_template,
        remember=job.remember,
    )


def _check(plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    lengths, options = plan.ruler_lengths or plan.lengths, _prompt_options(plan, texts)
    ruler_prompts(tokenizer, [min(lengths, default=0)], samples=1, progress=False, **options)
    require_haystack(tokenizer, lengths, options["tasks"], options["haystack"])


RULER = Measure(
    name="ruler",
    result=Ruler,
    run=_measured,
    help="RULER's 13 long-context tasks, through lm-eval",
    asks=True,
    settings=("ruler_samples", "chat_template", "seed"),
    parts=("lengths", "ruler_lengths", "ruler_tasks"),
    files=("squad", "hotpotqa"),
    shortest=lambda plan, tokenizer: SHORTEST_LENGTH,
    check=_check,
)
