"""Any of lm-eval's tasks by name, long or short, from the hub or from local files, with no prompt cut."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...generation.generation import PREFILL_CHUNK
from ...prompts.asking import TEMPLATE_OPTIONS, ChatTemplate, uses_chat_template
from ...prompts.text import numbered_json_lines, read_json_lines
from ..results.cache import Remember, afresh
from ..results.progress import token_bar
from ..results.result import Result
from .base import Job, Measure
from .harness import evaluate, local_task, quiet, require_lm_eval, sample_scores, task_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what long-context papers quote, and what short training may cost; RULER's tasks have a measure of their own
SUGGESTED = (
    "longbench2",
    "infinitebench",
    "babilong_longctx",
    "babilong",
    "graphwalks",
    "longbench",
    "longproc",
    "mmlu",
    "gsm8k",
    "ifeval",
)
_SHOWN = 300  # characters at the end of a prompt that are kept with its reply
_BABILONG = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # units of 1024 tokens that the hub has texts of
_NEW_TOKENS = 256  # lm-eval's own, where a task names none


@dataclass(frozen=True)
class LmEval(Result):
    """Scores of lm-eval's tasks.

    Args:
        accuracy: task or group as it was named -> mean over its samples of its first metric that is a score of each
            sample, of which more is better; mostly 0 to 1.
        parts: task or group -> each of its tasks -> that metric.
        metrics: each task -> every metric that lm-eval gave.
        scores: task or group -> that metric of each sample, in the order of the data.
        left_out: task or group -> samples that were left out because prompt and answer are longer than the length.
        replies: one of each task, as {task, question, expected, reply, score}; of multiple choice none.
    """

    title: ClassVar[str] = "lm-eval's tasks"
    column: ClassVar[str] = "accuracy"

    accuracy: dict[str, float]
    parts: dict[str, dict[str, float]]
    metrics: dict[str, dict[str, float]]
    scores: dict[str, list[float]]
    left_out: dict[str, int]
    replies: list[dict[str, Any]] = field(default_factory=list)

    def headline(self) -> dict[str, float]:
        return dict(self.accuracy)

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "task": name,
                "part": part,
                "accuracy": accuracy,
                "samples": len(self.scores[name]),
                "left_out": self.left_out[name],
            }
            for name, parts in self.parts.items()
            for part, accuracy in {**parts, "all": self.accuracy[name]}.items()
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import add_legend, draw_bars, new_figure

        figure, (axes,) = new_figure()
        names = list(next(iter(results.values())).accuracy)
        draw_bars(axes, names, {label: [r.accuracy[n] for n in names] for label, r in results.items()})
        axes.set(title="lm-eval's tasks", ylabel="score")
        axes.set_ylim(0, 1)
        add_legend(figure, axes)
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        said = []
        for label, result in results.items():
            figures = ", ".join(
                f"{name} {100 * a:.1f} over {len(result.scores[name])} samples" for name, a in result.accuracy.items()
            )
            said.append(f"{label}: {figures}.")
        first = next(iter(results.values()))
        left_out = [f"{n} of {name}" for name, n in first.left_out.items() if n]
        if left_out:
            said.append(
                f"Left out, because prompt and answer are longer than the longest length: {', '.join(left_out)}."
            )
        return said


class _Part(NamedTuple):
    """Which documents of a task are asked."""

    documents: list[int]
    left_out: int
    tokens: int  # of all prompts and answers together


def lm_eval_tasks(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    length: int,
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    chat_template: ChatTemplate = "auto",
    progress: bool = True,
    remember: Remember = afresh,
) -> LmEval:
    """Score lm-eval's own tasks, with its prompts and metrics and as many examples as it shows by itself.

    A document whose prompt and answer are longer than `length` is left out and counted; lm-eval would cut it to the
    window in the config without a word.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        tasks: names of tasks, groups or tags that the installed lm-eval knows: `mmlu`, `gsm8k`, `ifeval`, `longbench2`,
            `infinitebench`, `babilong`, `graphwalks` and so on.
        length: tokens that a prompt and its answer may have together.
        data: a folder with the data as files, rows with the fields of the hub's data set: TASK.jsonl(.xz), and
            TASK.fewshot.jsonl(.xz) for the examples of a task that takes them from the hub, which otherwise shows none.
            A group may have one file GROUP.jsonl(.xz) whose rows name their task in `task`, or as GROUP_SUBJECT in
            `subject`. None means the hub.
        limit: documents of each task at most.
        batch_size: prompts in a forward.
        chat_template: whether prompts are put through the tokenizer's chat template: "on", "off", or "auto", if there
            is one.
        progress: whether to show a bar over the tokens of each task.
        remember: keeps each task as soon as it is done.

    Raises:
        ImportError: lm-eval, or a package that one of the tasks needs, is not installed.
        ValueError: an unknown task, one without a document that is short enough, or rows that it cannot read.
        FileNotFoundError: the folder lacks the file of a task.
    """
    chat = uses_chat_template(tokenizer, chat_template)
    accuracy: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    metrics: dict[str, dict[str, float]] = {}
    scores: dict[str, list[float]] = {}
    left_out: dict[str, int] = {}
    replies: list[dict[str, Any]] = []
    for name, files in chosen_files(tasks, data).items():
        scores[name], left_out[name], parts[name] = [], 0, {}
        for leaf, source in files.items():

            def measure(leaf: str = leaf, source: "_Source" = source) -> dict[str, Any]:
                return _measure(model, tokenizer, leaf, source, length, limit, batch_size, chat, progress)

            # rows of one task may be in two files: its own and its group's
            rows = None if source.file is None else source.file.name
            value = remember({"task": leaf, "rows": rows}, measure)
            left_out[name] += value["left_out"]
            if not value["scores"]:
                continue
            metrics[leaf] = value["metrics"]
            scores[name] += value["scores"]
            parts[name][leaf] = sum(value["scores"]) / len(value["scores"])
            replies += value["replies"]
        if not scores[name]:
            raise ValueError(
                f"lm-eval's {name} has no document of up to {length} tokens with its answer: use a longer length."
            )
        accuracy[name] = sum(scores[name]) / len(scores[name])
    return LmEval(accuracy, parts, metrics, scores, left_out, replies)


class _Source(NamedTuple):
    """Where a task's rows are; `file` None means the hub."""

    file: Path | None
    examples: Path | None
    group: str | None


def check_tasks(tasks: Sequence[str], data: str | Path | None, length: int) -> None:
    """Raise what `lm_eval_tasks` would raise for want of a package, a name, a file or a field, without a model.

    Raises:
        ImportError: lm-eval, or what one of the tasks needs beside it, is not installed.
        ValueError: an unknown task, one without a score of each sample, or rows that it cannot read.
        FileNotFoundError: the folder lacks the file of a task.
        OSError: data of the hub cannot be had.
    """
    for files in chosen_files(tasks, data).values():
        for leaf, source in files.items():
            task = _built(leaf, source, 1, length)
            _metric(task, leaf)
            with quiet(), _explained(leaf, source):
                task.build_all_requests(limit=1)
                task.doc_to_target(next(iter(task.eval_docs)))


def chosen_files(tasks: Sequence[str], data: str | Path | None) -> dict[str, dict[str, _Source]]:
    """Task, group or tag as it was named -> each of its tasks -> where its rows are; arguments as in `lm_eval_tasks`.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown task, or a file with a row of no task, or that is not like the others.
        FileNotFoundError: the folder lacks the file of a task.
    """
    require_lm_eval()
    folder = None if data is None else Path(data)
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with data for lm-eval's tasks.")
    files: dict[str, dict[str, _Source]] = {}
    for name in tasks:
        leaves = _leaves(name)
        if folder is None:
            files[name] = dict.fromkeys(leaves, _Source(None, None, None))
            continue
        files[name] = {}
        of_group = _file(folder, name) if leaves != [name] else None
        in_group = set() if of_group is None else _tasks_in(of_group, name)
        if in_group - set(leaves):
            raise ValueError(
                f"{of_group} has rows of {', '.join(sorted(in_group - set(leaves))[:6])}, and lm-eval's {name} has no "
                f"such task: a row names its task in `task`, or as {name}_SUBJECT in `subject`. Its tasks: "
                f"{', '.join(leaves[:6])}{f' and {len(leaves) - 6} more' if len(leaves) > 6 else ''}."
            )
        for leaf in leaves:
            of_leaf = _file(folder, leaf)
            if of_leaf is not None:
                _tasks_in(of_leaf, None)
                files[name][leaf] = _Source(of_leaf, _file(folder, f"{leaf}.fewshot"), None)
            elif leaf in in_group:
                files[name][leaf] = _Source(of_group, _file(folder, f"{name}.fewshot"), name)
        if not files[name]:
            names = f"{name}.jsonl" if leaves == [name] else f"{name}.jsonl, nor any of {', '.join(leaves[:6])}, ..."
            raise FileNotFoundError(f"{folder} has no {names} as .jsonl or .jsonl.xz, for lm-eval's {name!r}.")
    return files


def _leaves(name: str) -> list[str]:
    """The tasks that a name stands for.

    Raises:
        ValueError: lm-eval knows no such name.
    """
    index = task_index()
    entry = index.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, [*SUGGESTED, *index], n=5)
        raise ValueError(
            f"lm-eval has no task {name!r}."
            + (f" Near to it: {', '.join(dict.fromkeys(near))}." if near else "")
            + f" It knows {len(index)} names, among them {', '.join(s for s in SUGGESTED if s in index)}; "
            "`lm-eval ls tasks` shows all."
        )
    kind = entry.kind.name
    if kind == "GROUP":
        members = [m if isinstance(m, str) else m.get("task", m.get("group")) for m in entry.cfg["task"]]
    elif kind == "TAG":
        members = sorted(entry.tags)
    else:
        return [name]
    return list(dict.fromkeys(leaf for member in members for leaf in _leaves(member)))


def _file(folder: Path, stem: str) -> Path | None:
    return next((f for f in (folder / f"{stem}{e}" for e in (".jsonl", ".jsonl.xz")) if f.is_file()), None)


def _task_of(row: Mapping[str, Any], group: str) -> str:
    """The task that a row of a group's file belongs to."""
    return str(row.get("task", f"{group}_{row.get('subject')}"))


def _tasks_in(file: Path, group: str | None) -> set[str]:
    """The tasks that a group's file has rows of, or the name of a task's own file; every line is read.

    Raises:
        ValueError: there is no row, a line is no JSON object, or it lacks a field that the first of its task has, which
            would be empty in silence.
    """
    fields: dict[str, set[str]] = {}
    for number, row in numbered_json_lines(file):
        task = file.name if group is None else _task_of(row, group)
        missing = fields.setdefault(task, set(row)) - set(row)
        if missing:
            raise ValueError(
                f"line {number} of {file} has no field {', '.join(sorted(missing))}, which the first row of {task} has."
            )
    if not fields:
        raise ValueError(f"{file} has no rows.")
    return set(fields)


def _rows(file: Path, group: str | None, leaf: str) -> Iterator[Mapping[str, Any]]:
    """Rows of one task, read as far as they are taken."""
    return (row for row in read_json_lines(file) if group is None or _task_of(row, group) == leaf)


def _built(leaf: str, source: _Source, limit: int | None, length: int) -> Any:
    """lm-eval's task; BABILong's from the hub with texts of up to `length`, since lm-eval takes its shortest by itself.

    Raises:
        ImportError: it needs a package that is not installed.
        OSError: data of the hub cannot be had.
    """
    with _explained(leaf, source):
        if source.file is None:
            overrides: dict[str, Any] = {}
            if "babilong" in leaf:
                longest = max(k for k in _BABILONG if 1024 * k <= length)
                overrides["metadata"] = {"max_seq_lengths": f"{longest}k"}
            task = local_task(leaf, None, "test", shots=None, **overrides)
        else:
            documents = list(islice(_rows(source.file, source.group, leaf), limit))
            examples = None if source.examples is None else list(_rows(source.examples, source.group, leaf))
            task = local_task(leaf, documents, "test", examples=examples, shots=None)
            if examples is not None and len(examples) < (task.config.num_fewshot or 0):
                raise ValueError(f"it shows {task.config.num_fewshot} examples, and there are {len(examples)}")
        if "ifeval" in leaf:
            _require_sentences(leaf)
        return task


@contextmanager
def _explained(leaf: str, source: _Source) -> Iterator[None]:
    """What lm-eval and datasets raise while they make a task and its prompts, as errors that say what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        has_extra = leaf in metadata("lm_eval").get_all("Provides-Extra", [])
        wanted = f"'lm_eval[{leaf}]'" if has_extra else f"{error.name}, or lm-eval with the extra for this task"
        raise ImportError(
            f"lm-eval's {leaf} needs the package {error.name}, which is not installed: pip install {wanted}."
        ) from error
    except ImportError:
        raise
    except OSError as error:
        raise OSError(
            f"the data of lm-eval's {leaf} cannot be had from the hub ({type(error).__name__}: {error}): give a folder "
            f"with {leaf}.jsonl in it, as --lm-eval-data or `data`."
        ) from error
    except Exception as error:  # of Jinja, datasets, lm-eval or a task's own code: rows are not what the task reads
        if source.file is None:
            raise
        files = " or ".join(str(file) for file in (source.file, source.examples) if file is not None)
        fields = ", ".join(next(_rows(source.file, source.group, leaf)))
        raise ValueError(
            f"lm-eval's {leaf} cannot read {files} ({type(error).__name__}: {error}). Rows need the fields of the "
            f"task's data set on the hub; these have {fields}."
        ) from error


def _metric(task: Any, leaf: str) -> str:
    """The first metric of a task that is a score of each sample, of which more is better: models are paired by it.

    Raises:
        ValueError: there is none.
    """
    with quiet():
        from lm_eval.api.metrics import mean, median, nanmean
        from lm_eval.api.registry import AGGREGATION_REGISTRY

        # beside these what lm-eval knows by name is of all samples together, as perplexity, BLEU and F1
        of_all = {AGGREGATION_REGISTRY.get(name) for name in AGGREGATION_REGISTRY} - {mean, median, nanmean}
    aggregations, more_is_better = task.aggregation(), task.higher_is_better()
    for name, aggregation in aggregations.items():
        if more_is_better.get(name) and aggregation not in of_all:
            return str(name)
    raise ValueError(
        f"lm-eval's {leaf} has no metric that is a score of each sample, of which more is better; it has "
        f"{', '.join(map(str, aggregations)) or 'none'}. Name another task, or measure this one by lm-eval itself."
    )


def _require_sentences(leaf: str) -> None:
    """IFEval splits answers into words by data of NLTK's, and would fail when the model has written all of them.

    Raises:
        ImportError: they are not there, or not whole.
    """
    import nltk

    try:
        nltk.tokenize.PunktTokenizer("english")
    except LookupError as error:
        raise ImportError(
            f"lm-eval's {leaf} needs NLTK's data punkt_tab, which are not installed, or not whole: run "
            "python -m nltk.downloader punkt_tab once, with the network."
        ) from error


def _measure(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    leaf: str,
    source: _Source,
    length: int,
    limit: int | None,
    batch_size: int,
    chat: bool,
    progress: bool,
) -> dict[str, Any]:
    task = _built(leaf, source, limit, length)
    generates = task.config.output_type == "generate_until"
    with _explained(leaf, source):
        part = _fitting(task, tokenizer, length, limit, chat)
    if not part.documents:
        return {"scores": [], "left_out": part.left_out, "metrics": {}, "replies": []}
    if generates and length > PREFILL_CHUNK:
        chunk = max(PREFILL_CHUNK // batch_size, 1)
        task.set_config("generation_kwargs", {"prefill_chunk_size": chunk}, update=True)
    with token_bar(model, part.tokens, leaf, show=progress):
        metrics, logged = evaluate(
            model, tokenizer, task, batch_size=batch_size, max_length=length, samples=part.documents, chat=chat
        )
    metric = _metric(task, leaf)
    floats = {k.removesuffix(",none"): v for k, v in metrics.items() if isinstance(v, float) and "stderr" not in k}
    first = min(logged, key=lambda s: s["doc_id"])
    reply = {
        "task": leaf,
        "question": str(first["arguments"][0][0])[-_SHOWN:],
        "expected": "" if "ifeval" in leaf else str(first["target"]),  # IFEval goes by rules; its targets are all 0
        "reply": str(first["resps"][0][0]),
        "score": float(first[metric]),
    }
    return {
        "scores": sample_scores(logged, metric),
        "left_out": part.left_out,
        "metrics": floats,
        "replies": [reply] if generates else [],
    }


def _fitting(task: Any, tokenizer: PreTrainedTokenizerBase, length: int, limit: int | None, chat: bool) -> _Part:
    """The documents whose prompts, as lm-eval makes them, have up to `length` tokens with their answers."""

    def through_template(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **TEMPLATE_OPTIONS,
            )
        )

    count = partial(_tokens, tokenizer, task)
    with quiet():
        task.build_all_requests(limit=limit, apply_chat_template=chat, chat_template=through_template if chat else None)
    tokens: dict[int, list[int]] = {}
    for request in task.instances:
        tokens.setdefault(request.doc_id, []).append(count(request))
    documents = [doc for doc in sorted(tokens) if max(tokens[doc]) <= length]
    return _Part(documents, len(tokens) - len(documents), sum(sum(tokens[doc]) for doc in documents))


def _tokens(tokenizer: PreTrainedTokenizerBase, task: Any, request: Any) -> int:
    """Of a prompt and its answer, with one for a token that begins any text."""
    prompt, answer = request.args
    if isinstance(answer, str):
        return 1 + len(tokenizer(prompt + answer, add_special_tokens=False, verbose=False)["input_ids"])
    new = answer.get("max_gen_toks", _NEW_TOKENS)
    return 1 + new + len(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])


def _measured(job: Job) -> LmEval:
    plan = job.plan
    return lm_eval_tasks(
        job.model,
        job.tokenizer,
        plan.lm_eval,
        length=plan.length,
        data=plan.lm_eval_data,
        limit=plan.limit,
        batch_size=plan.batch_size or 4,
        chat_template=plan.chat_template,
        remember=job.remember,
    )


LM_EVAL = Measure(
    name="lm-eval",
    result=LmEval,
    run=_measured,
    help="tasks, groups or tags of the installed lm-eval by name: long ones such as longbench2, infinitebench, "
    "babilong, graphwalks, and short ones such as mmlu, gsm8k, ifeval. niah_... and ruler_... are RULER's, at "
    "--lengths. Documents longer than --length are left out",
    argument={
        "metavar": "TASK[,TASK]",
        "type": lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
        "default": (),
    },
    asks=True,
    settings=("limit", "length", "chat_template"),
    parts=("lm_eval",),
    files=("lm_eval_data",),
    check=lambda plan, *_: check_tasks(plan.lm_eval, plan.lm_eval_data, plan.length),
)
