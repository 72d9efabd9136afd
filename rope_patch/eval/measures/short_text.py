"""Short-text benchmarks through lm-eval, from the hub or from local files: what adaptation must not ruin."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...prompts.asking import ChatTemplate, uses_chat_template
from ...prompts.text import numbered_json_lines
from ..results.cache import Remember, afresh
from ..results.result import Result
from .base import Job, Measure
from .comparisons import recovery_ratio
from .harness import evaluate, local_task, require_lm_eval, sample_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..suite import EvalPlan

Row = dict[str, Any]


@dataclass(frozen=True)
class _Benchmark:
    """How a local file becomes lm-eval's documents.

    Args:
        file: stem of the local file, which ends in .jsonl or .jsonl.xz.
        split: the split that lm-eval's task evaluates.
        fields: of a row: strings, but for `choices` and `label`, the index of the right one (0 or 1 without `choices`).
        convert: a row of the file -> a row with the hub's fields.
        metric: the figure that is quoted for it.
        overrides: fields of lm-eval's config that do not fit such rows.
        continues: whether its answer is the next word of a text. Behind a chat template a model replies to the text
            instead, and has none of them right.
    """

    file: str
    split: str
    fields: tuple[str, ...]
    convert: Callable[[Row], Row]
    metric: str = "acc"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


def _letters(row: Row, question: str) -> Row:
    labels = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    choices = {"text": row["choices"], "label": labels}
    return {question: row["question"], "choices": choices, "answerKey": labels[row["label"]]}


def _hellaswag(row: Row) -> Row:
    from lm_eval.tasks.hellaswag.utils import preprocess

    # lm-eval joins the hub's three parts of a context and capitalises the half-sentence at its end; here it is joined
    context = row["ctx"]
    end = max(context.rfind(mark) for mark in ".!?:") + 1
    half = context[end:].strip()
    query = preprocess(f"{context[:end]} {half.capitalize()}" if half else context)
    return {"query": query, "choices": [preprocess(c) for c in row["choices"]], "label": str(row["label"])}


def _of_questions(file: str, question: str) -> _Benchmark:
    """One whose choices have letters; `question` is what the hub calls that field."""
    fields = "question", "choices", "label"
    return _Benchmark(file, "test", fields, lambda r: _letters(r, question), "acc_norm")


BENCHMARKS: dict[str, _Benchmark] = {
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
            "answer": str(r["label"] + 1),
        },
    ),
    "arc_easy": _of_questions("arc_easy_test", "question"),
    "arc_challenge": _of_questions("arc_challenge_test", "question"),
    "openbookqa": _of_questions("openbookqa_test", "question_stem"),
    "boolq": _Benchmark(
        "boolq_dev",
        "validation",
        ("passage", "question", "label"),
        lambda r: {"passage": r["passage"], "question": r["question"], "label": int(r["label"])},
    ),
}


@dataclass(frozen=True)
class ShortText(Result):
    """Accuracies of short benchmarks.

    Args:
        accuracy: benchmark -> the metric that is quoted for it (length-normalised where that is the custom), 0 to 1.
        metrics: benchmark -> every metric that lm-eval gave.
        samples: benchmark -> samples measured.
        scores: benchmark -> the quoted metric of each sample, in the order of the data; empty where it was not kept.
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

    def beside(self, first: Self) -> dict[str, float]:
        return {"recovery ratio, short text (%)": recovery_ratio(self.accuracy, first.accuracy)} if first.mean else {}

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import add_legend, draw_bars, new_figure

        figure, (axes,) = new_figure()
        names = list(next(iter(results.values())).accuracy)
        draw_bars(axes, [*names, "mean"], {k: [*(r.accuracy[n] for n in names), r.mean] for k, r in results.items()})
        axes.set(title="short-text benchmarks", ylabel="accuracy")
        axes.set_ylim(0, 1)
        add_legend(figure, axes)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        (first, native), *others = results.items()
        said = [f"{first}: mean accuracy {100 * native.mean:.1f} %."]
        for label, result in others:
            # a few samples may all be answered wrong, and nothing is a share of 0
            share = f", {100 * result.mean / native.mean:.1f} % of {first}" if native.mean else ""
            said.append(f"{label}: {100 * result.mean:.1f} %{share}.")
        return [*said, "Adaptation to long text should leave these where they were."]


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
    """Zero-shot accuracy on lm-eval's own tasks, with its prompts and metrics.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        data: a folder with the benchmarks as .jsonl or .jsonl.xz files, an object a line: `lambada_openai_test` (text),
            `hellaswag_val` (ctx, choices, label), `piqa_valid` (goal, choices, label), `winogrande_dev` (sentence,
            choices, label), `arc_easy_test`, `arc_challenge_test`, `openbookqa_test` (question, choices, label) and
            `boolq_dev` (passage, question, label), `label` being the index of the right choice. None means the hub's.
        benchmarks: names; None means all that `data` has, or all eight from the hub.
        limit: samples of each at most.
        batch_size: requests in a forward.
        max_length: tokens of the longest request.
        chat_template: whether questions are put through the tokenizer's chat template: "on", "off", or "auto", if there
            is one, but for LAMBADA's: a chat's reply does not begin with the next word of a text.
        remember: keeps each benchmark as soon as it is done.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown benchmark, or a file without rows or of another form.
        FileNotFoundError: the folder lacks a benchmark.
    """
    require_lm_eval()
    chat = uses_chat_template(tokenizer, chat_template)
    names, files = chosen_benchmarks(data, benchmarks)
    accuracy, metrics, samples, scores = {}, {}, {}, {}
    for name in names:

        def measure(name: str = name) -> dict[str, Any]:
            benchmark = BENCHMARKS[name]
            if data is None:
                task = local_task(name, None, benchmark.split)
            else:
                documents = [benchmark.convert(row) for row in islice(rows_of(name, files[name]), limit)]
                task = local_task(name, documents, benchmark.split, **benchmark.overrides)
            measured, logged = evaluate(
                model,
                tokenizer,
                task,
                batch_size=batch_size,
                max_length=max_length,
                limit=limit,
                chat=chat and not (benchmark.continues and chat_template == "auto"),
            )
            floats = {
                k.removesuffix(",none"): v for k, v in measured.items() if isinstance(v, float) and "stderr" not in k
            }
            of_each = sample_scores(logged, benchmark.metric)
            return {"metrics": floats, "samples": len(of_each), "scores": of_each}

        value = remember({"benchmark": name}, measure)
        metrics[name], samples[name] = value["metrics"], value["samples"]
        accuracy[name], scores[name] = metrics[name][BENCHMARKS[name].metric], value["scores"]
    return ShortText(accuracy, metrics, samples, scores)


def chosen_benchmarks(data: str | Path | None, benchmarks: Sequence[str] | None) -> tuple[list[str], dict[str, Path]]:
    """Names of the benchmarks that are measured, and the local file of each; arguments as in `short_text`.

    Raises:
        ValueError: an unknown benchmark, or a file without rows or of another form.
        FileNotFoundError: the folder lacks a benchmark.
    """
    files = {} if data is None else _files(Path(data))
    names = list(benchmarks) if benchmarks is not None else [n for n in BENCHMARKS if data is None or n in files]
    for name in names:
        if name not in BENCHMARKS:
            raise ValueError(f"unknown benchmark {name!r}. Known: {', '.join(BENCHMARKS)}.")
        if data is not None and name not in files:
            raise FileNotFoundError(f"{data} has no {BENCHMARKS[name].file}.jsonl or .jsonl.xz for {name!r}.")
    if not names:
        raise FileNotFoundError(
            f"{data} has none of {', '.join(b.file for b in BENCHMARKS.values())} as .jsonl or .jsonl.xz."
        )
    if data is not None:
        for name in names:
            if not list(rows_of(name, files[name])):
                raise ValueError(f"{files[name]} has no rows.")
    return names, files


def rows_of(benchmark: str, file: Path) -> Iterator[Row]:
    """Rows of a benchmark's local file.

    Raises:
        ValueError: a row has other fields than `short_text` lists, or other values in them.
    """
    for number, row in numbered_json_lines(file):
        _require_row(row, BENCHMARKS[benchmark], f"line {number} of {file}")
        yield row


def _require_row(row: Row, benchmark: _Benchmark, where: str) -> None:
    fields = benchmark.fields
    missing = [name for name in fields if name not in row]
    if missing:
        raise ValueError(
            f"{where} has no field {', '.join(missing)}; it has {', '.join(row)}. Rows of {benchmark.file} have "
            f"{', '.join(fields)}."
        )
    for name in fields:
        if name not in ("choices", "label") and not isinstance(row[name], str):
            raise ValueError(f"the field {name} of {where} must be a string, got {row[name]!r}.")
    choices = row["choices"] if "choices" in fields else ["no", "yes"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"the field choices of {where} must be a list of two strings or more, got {choices!r}.")
    if "label" in fields and not (isinstance(row["label"], int) and 0 <= row["label"] < len(choices)):
        raise ValueError(
            f"the field label of {where} must be the index of the right choice, an integer from 0 to "
            f"{len(choices) - 1}, got {row['label']!r}."
        )


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with short-text benchmarks.")
    files = {}
    for name, benchmark in BENCHMARKS.items():
        for ending in (".jsonl", ".jsonl.xz"):
            if (folder / (benchmark.file + ending)).is_file():
                files[name] = folder / (benchmark.file + ending)
    return files


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


def _check(plan: "EvalPlan", *_: object) -> None:
    require_lm_eval()
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
