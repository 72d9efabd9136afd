"""Short-text benchmarks through lm-eval, from the hub or from local files: they show catastrophic forgetting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...prompts.asking import ChatTemplate, uses_chat_template
from ...prompts.text import numbered_json_lines
from ..results.cache import Remember, afresh
from ..results.figures import Figure, score_figure
from ..results.result import Result
from .base import Job, Measure
from .comparisons import recovery_ratio
from .harness import data_file, evaluate, local_task, require_lm_eval, sample_scores, task_index
from .lm_eval_tasks import leaf_tasks

Row = dict[str, Any]


@dataclass(frozen=True)
class _Benchmark:
    """How rows of a local file become lm-eval's documents.

    Args:
        file: stem of the local file, which ends in .jsonl or .jsonl.xz.
        split: the split that lm-eval's task evaluates.
        fields: fields of a row. All are strings, except `choices`, a list of strings, and `label`, the index of the
            right choice (0 or 1 without `choices`). With `subject`, lm-eval has a task for each subject.
        convert: a row of the file -> a row with the hub's fields.
        metric: the metric that is reported.
        overrides: fields of lm-eval's config to replace.
        continues: whether the answer is the next word of a text. In a chat template a model would reply to the text
            instead, and score 0.
    """

    file: str
    split: str
    fields: tuple[str, ...]
    convert: Callable[[Row], Row]
    metric: str = "acc"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


def _hellaswag(row: Row) -> Row:
    from lm_eval.tasks.hellaswag.utils import preprocess

    # lm-eval joins the hub's three parts of a context, and capitalises the incomplete sentence at the end
    context = row["ctx"]
    end = max(context.rfind(mark) for mark in ".!?:") + 1
    half = context[end:].strip()
    query = preprocess(f"{context[:end]} {half.capitalize()}" if half else context)
    return {"query": query, "choices": [preprocess(c) for c in row["choices"]], "label": str(row["label"])}


def _multiple_choice(file: str, question: str = "question") -> _Benchmark:
    """A benchmark whose choices have letters; `question` is the hub's name of that field."""

    def convert(row: Row) -> Row:
        labels = [chr(ord("A") + i) for i in range(len(row["choices"]))]
        choices = {"text": row["choices"], "label": labels}
        return {question: row["question"], "choices": choices, "answerKey": labels[row["label"]]}

    return _Benchmark(file, "test", ("question", "choices", "label"), convert, "acc_norm")


_EIGHT: dict[str, _Benchmark] = {
    "lambada_openai": _Benchmark(
        "lambada_openai_test", "test", ("text",), lambda r: {"text": r["text"]}, continues=True
    ),
    "hellaswag": _Benchmark(
        "hellaswag_val",
        "validation",
        ("ctx", "choices", "label"),
        _hellaswag,
        "acc_norm",
        overrides={"process_docs": None},
    ),
    "piqa": _Benchmark(
        "piqa_valid",
        "validation",
        ("goal", "choices", "label"),
        lambda r: {"goal": r["goal"], "sol1": r["choices"][0], "sol2": r["choices"][1], "label": r["label"]},
        "acc_norm",
    ),
    "winogrande": _Benchmark(
        "winogrande_dev",
        "validation",
        ("sentence", "choices", "label"),
        lambda r: {
            "sentence": r["sentence"],
            "option1": r["choices"][0],
            "option2": r["choices"][1],
            "answer": str(r["label"] + 1),  # "1" or "2"
        },
    ),
    "arc_easy": _multiple_choice("arc_easy_test"),
    "arc_challenge": _multiple_choice("arc_challenge_test"),
    "openbookqa": _multiple_choice("openbookqa_test", "question_stem"),
    "boolq": _Benchmark(
        "boolq_dev",
        "validation",
        ("passage", "question", "label"),
        lambda r: {"passage": r["passage"], "question": r["question"], "label": int(r["label"])},
    ),
}
BENCHMARKS = _EIGHT | {
    "mmlu": _Benchmark(
        "mmlu_test",
        "test",
        ("subject", "question", "choices", "label"),
        lambda r: {"question": r["question"], "choices": r["choices"], "answer": r["label"]},
    ),
    "mathqa": _Benchmark(
        "mathqa_test",
        "test",
        ("question", "choices", "label"),
        lambda r: {"Problem": r["question"], "choices": r["choices"], "correct": "abcde"[r["label"]]},
        overrides={"doc_to_choice": "choices"},
    ),
    "social_iqa": _Benchmark(
        "social_iqa_dev",
        "validation",
        ("context", "question", "choices", "label"),
        lambda r: {
            "context": r["context"],
            "question": r["question"],
            **{f"answer{letter}": choice for letter, choice in zip("ABC", r["choices"], strict=True)},
            "label": str(r["label"] + 1),  # "1" to "3"
        },
    ),
}
SETS = {
    "linearard": (
        "mmlu",
        "lambada_openai",
        "mathqa",
        "boolq",
        "openbookqa",
        "piqa",
        "social_iqa",
        "arc_challenge",
    )
}
"""Name of a set -> its benchmarks. Source: LinearARD, arXiv:2604.00004, its average of short text."""


@dataclass(frozen=True)
class ShortText(Result):
    """Accuracies of short-text benchmarks.

    Args:
        accuracy: benchmark -> its reported metric (length-normalised accuracy where that is usual), 0 to 1.
        metrics: benchmark -> all metrics of lm-eval.
        samples: benchmark -> number of samples.
        scores: benchmark -> the reported metric of each sample, in the order of the data.
    """

    title: ClassVar[str] = "Short text"
    column: ClassVar[str] = "accuracy"

    accuracy: dict[str, float]
    metrics: dict[str, dict[str, float]]
    samples: dict[str, int]
    scores: dict[str, list[float]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Unweighted mean of `accuracy`."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    def headline(self) -> dict[str, float]:
        return {"short-text accuracy, mean": self.mean}

    def table(self) -> list[dict[str, Any]]:
        rows = [{"benchmark": k, "accuracy": a, "samples": self.samples[k]} for k, a in self.accuracy.items()]
        return [*rows, {"benchmark": "mean", "accuracy": self.mean, "samples": sum(self.samples.values())}]

    def compared_with(self, first: Self) -> dict[str, float]:
        return {"recovery ratio, short text (%)": recovery_ratio(self.accuracy, first.accuracy)} if first.mean else {}

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        names = list(next(iter(results.values())).accuracy)
        scores = {label: [*(r.accuracy[n] for n in names), r.mean] for label, r in results.items()}
        return score_figure([*names, "mean"], scores, title="short-text benchmarks", ylabel="accuracy")

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        (first, native), *others = results.items()
        sentences = [f"{first}: mean accuracy {100 * native.mean:.1f} %."]
        for label, result in others:
            # no share of a mean of 0, which a few samples can have
            share = f", {100 * result.mean / native.mean:.1f} % of {first}" if native.mean else ""
            sentences.append(f"{label}: {100 * result.mean:.1f} %{share}.")
        return [*sentences, "Adaptation to long text should not change these accuracies."]


def short_text(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data: str | Path | None = None,
    benchmarks: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int = 2048,
    chat_template: ChatTemplate = "auto",
    remember: Remember = afresh,
) -> ShortText:
    """Zero-shot accuracy on lm-eval's tasks, with its prompts and metrics.

    Args:
        model: a causal LM.
        tokenizer: tokenizer of the model.
        data: folder with the benchmarks as .jsonl or .jsonl.xz files, one object a line: `lambada_openai_test` (text),
            `hellaswag_val` (ctx, choices, label), `piqa_valid` (goal, choices, label), `winogrande_dev` (sentence,
            choices, label), `arc_easy_test`, `arc_challenge_test`, `openbookqa_test` (question, choices, label) and
            `boolq_dev` (passage, question, label); if they are named, `mmlu_test` (subject, question, choices, label),
            `mathqa_test` (question, choices, label) and `social_iqa_dev` (context, question, choices, label). `label`
            is the index of the right choice. None means the hub.
        benchmarks: names of benchmarks, or "linearard" for the eight of LinearARD's average, with `mmlu`, `mathqa` and
            `social_iqa`. None means those of the other eight that `data` has, or all of them from the hub.
        limit: maximum number of samples of each benchmark, and of each subject of MMLU.
        batch_size: requests in a forward pass.
        max_length: tokens of the longest request.
        chat_template: whether to use the tokenizer's chat template: "on", "off", or "auto", if there is one. "auto"
            excepts LAMBADA, because the reply in a chat does not begin with the next word of a text.
        remember: stores each benchmark as soon as it is done.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown benchmark, or a file without rows or of another form.
        FileNotFoundError: the folder lacks a benchmark.
    """
    chat = uses_chat_template(tokenizer, chat_template)

    def measure(name: str, file: Path | None) -> dict[str, Any]:
        benchmark = BENCHMARKS[name]
        tasks = [
            local_task(leaf, documents, benchmark.split, **({} if documents is None else benchmark.overrides))
            for leaf, documents in _documents(name, file, limit).items()
        ]
        found = evaluate(
            model,
            tokenizer,
            tasks,
            batch_size=batch_size,
            max_length=max_length,
            limit=limit,
            chat=chat and not (benchmark.continues and chat_template == "auto"),
        )
        scores = [score for _, logged in found for score in sample_scores(logged, benchmark.metric)]
        # of several tasks lm-eval's own mean is that over their samples
        metrics = found[0][0] if len(found) == 1 else {benchmark.metric: sum(scores) / len(scores)}
        return {"metrics": metrics, "samples": len(scores), "scores": scores}

    done = {
        name: remember({"benchmark": name}, partial(measure, name, file))
        for name, file in chosen_benchmarks(data, benchmarks).items()
    }
    return ShortText(
        accuracy={name: value["metrics"][BENCHMARKS[name].metric] for name, value in done.items()},
        metrics={name: value["metrics"] for name, value in done.items()},
        samples={name: value["samples"] for name, value in done.items()},
        scores={name: value["scores"] for name, value in done.items()},
    )


def chosen_benchmarks(data: str | Path | None, benchmarks: Sequence[str] | None) -> dict[str, Path | None]:
    """Benchmark -> its local file, None for the hub; arguments as in `short_text`."""
    require_lm_eval()
    named = [name for given in benchmarks or () for name in SETS.get(given, (given,))]
    for name in named:
        if name not in BENCHMARKS:
            raise ValueError(f"unknown benchmark {name!r}. Known: {', '.join([*BENCHMARKS, *SETS])}.")
    if data is None:
        return dict.fromkeys(_EIGHT if benchmarks is None else named)
    files = {name: data_file(data, benchmark.file) for name, benchmark in BENCHMARKS.items()}
    chosen = named if benchmarks is not None else [name for name in _EIGHT if files[name]]
    if not chosen:
        raise FileNotFoundError(
            f"{data} has none of {', '.join(b.file for b in _EIGHT.values())} as .jsonl or .jsonl.xz."
        )
    for name in chosen:
        file = files[name]
        if file is None:
            raise FileNotFoundError(f"{data} has no {BENCHMARKS[name].file}.jsonl or .jsonl.xz for {name!r}.")
        if not list(benchmark_rows(name, file)):
            raise ValueError(f"{file} has no rows.")
    return {name: files[name] for name in chosen}


def _documents(name: str, file: Path | None, limit: int | None) -> Mapping[str, list[Row] | None]:
    """lm-eval's tasks of a benchmark -> up to `limit` documents of each, None for the hub's."""
    has_subjects = "subject" in BENCHMARKS[name].fields
    if file is None:
        return dict.fromkeys(leaf_tasks(name) if has_subjects else [name])
    documents: dict[str, list[Row]] = {}
    for row in benchmark_rows(name, file):
        of_task = documents.setdefault(f"{name}_{row['subject']}" if has_subjects else name, [])
        if limit is None or len(of_task) < limit:
            of_task.append(BENCHMARKS[name].convert(row))
    return documents


def benchmark_rows(benchmark: str, file: Path) -> Iterator[Row]:
    """Rows of a benchmark's local file; ValueError if one lacks a field or has another type of value in it."""
    fields = BENCHMARKS[benchmark].fields
    for number, row in numbered_json_lines(file):
        choices = row.get("choices") if "choices" in fields else ["no", "yes"]
        n_choices = len(choices) if isinstance(choices, list) and all(isinstance(c, str) for c in choices) else 0
        must_be = {name: ("a string", isinstance(row.get(name), str)) for name in fields}
        if "choices" in fields:
            must_be["choices"] = "a list of two strings or more", n_choices > 1
        if "label" in fields:
            is_index = isinstance(row.get("label"), int) and 0 <= row["label"] < n_choices
            must_be["label"] = f"the index of the right choice, from 0 to {n_choices - 1}", is_index
        if "subject" in fields:
            is_task = f"{benchmark}_{row.get('subject')}" in task_index()
            must_be["subject"] = f"a subject of lm-eval's {benchmark}, as in {benchmark}_SUBJECT", is_task
        for name, (form, fits) in must_be.items():
            if not fits:
                got = repr(row[name]) if name in row else f"no such field among {', '.join(row)}"
                raise ValueError(f"the field {name} of line {number} of {file} must be {form}, got {got}.")
        yield row


def _measured(job: Job) -> ShortText:
    plan = job.plan
    return short_text(
        job.model,
        job.tokenizer,
        data=plan.short_data,
        benchmarks=plan.benchmarks,
        limit=plan.limit,
        batch_size=4 * (plan.batch_size or 4),
        chat_template=plan.chat_template,
        remember=job.remember,
    )


def _check(plan: Any, *_: object) -> None:
    chosen_benchmarks(plan.short_data, plan.benchmarks)


SHORT = Measure(
    name="short",
    result=ShortText,
    run=_measured,
    help="eight benchmarks of short text, through lm-eval: what long-context training must not ruin",
    asks=True,
    settings=("limit", "chat_template"),
    parts=("benchmarks",),
    files=("short_data",),
    check=_check,
)
