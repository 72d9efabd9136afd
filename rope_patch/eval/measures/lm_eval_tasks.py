"""Any of lm-eval's tasks by name, from the hub or from local files, with no prompt truncated."""

import difflib
import os
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
from ..results.figures import Figure, score_figure
from ..results.progress import token_bar
from ..results.result import Result
from .base import Job, Measure
from .harness import data_file, evaluate, included_tasks, local_task, quiet, require_lm_eval, sample_scores, task_index

if TYPE_CHECKING:
    from ..suite import EvalPlan

# long-context tasks of papers, and short ones that show what training cost; RULER has its own measure
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
_SHOWN = 300  # characters at the end of a prompt that are stored with its reply
_BABILONG = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # lengths of the hub's texts, in units of 1024 tokens
_NEW_TOKENS = 256  # lm-eval's default


@dataclass(frozen=True)
class LmEval(Result):
    """Scores of lm-eval's tasks.

    A name is a task, a group or a tag as the user named it, and stands for one or more leaf tasks.

    Args:
        accuracy: name -> mean over its samples of the first metric that is a score of each sample and higher is better;
            mostly 0 to 1.
        parts: name -> each of its leaf tasks -> the mean of that metric.
        metrics: leaf task -> all metrics of lm-eval.
        scores: name -> that metric of each sample, in the order of the data.
        left_out: name -> number of samples left out because prompt and answer exceed the length.
        replies: one reply of each leaf task, as {task, question, expected, reply, score}; none for multiple choice.
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
    def figure(cls, results: Mapping[str, Self]) -> Figure:
        names = list(next(iter(results.values())).accuracy)
        scores = {label: [r.accuracy[n] for n in names] for label, r in results.items()}
        return score_figure(names, scores, title="lm-eval's tasks", ylabel="score")

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        sentences = []
        for label, result in results.items():
            figures = ", ".join(
                f"{name} {100 * a:.1f} over {len(result.scores[name])} samples" for name, a in result.accuracy.items()
            )
            sentences.append(f"{label}: {figures}.")
        first = next(iter(results.values()))
        left_out = [f"{n} of {name}" for name, n in first.left_out.items() if n]
        if left_out:
            sentences.append(
                f"Left out, because prompt and answer are longer than the longest length: {', '.join(left_out)}."
            )
        return sentences


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
    confirm_run_unsafe_code: bool = False,
    include: str | Path | None = None,
) -> LmEval:
    """Score lm-eval's tasks with its prompts, metrics and default number of few-shot examples.

    A document whose prompt and answer exceed `length` is left out and counted. lm-eval alone would cut it to the window
    in the config without a warning.

    Args:
        model: a causal LM.
        tokenizer: tokenizer of the model.
        tasks: names of tasks, groups or tags of the installed lm-eval: `mmlu`, `gsm8k`, `ifeval`, `longbench2`,
            `infinitebench`, `babilong`, `graphwalks` and so on, and of `include`.
        length: tokens that a prompt and its answer may have together.
        data: folder with the data, rows with the fields of the hub's dataset. TASK.jsonl(.xz) has the documents of a
            task, and TASK.fewshot.jsonl(.xz) the examples if it takes them from the hub; without that file it has none.
            A group may have one file GROUP.jsonl(.xz) whose rows name their task in `task`, or as GROUP_SUBJECT in
            `subject`. None means the hub.
        limit: maximum number of documents of each task.
        batch_size: prompts in a forward pass.
        chat_template: whether to use the tokenizer's chat template: "on", "off", or "auto", if there is one.
        progress: whether to show a bar over the tokens of each task.
        remember: stores each task as soon as it is done.
        confirm_run_unsafe_code: whether tasks such as `humaneval` and `mbpp` may run the code that the model writes.
        include: folder with the YAML files of tasks of your own, as `lm-eval --include_path` takes it.

    Raises:
        ImportError: lm-eval, or a package that one of the tasks needs, is not installed.
        ValueError: an unknown task, a task without a document that is short enough, a task that may run code of the
            model without your consent, or rows that it cannot read.
        FileNotFoundError: the folder lacks the file of a task.
    """
    chat = uses_chat_template(tokenizer, chat_template)
    with included_tasks(include):
        result = LmEval({}, {}, {}, {}, {}, [])
        check_code(tasks, confirm_run_unsafe_code)
        for name, sources in chosen_files(tasks, data).items():
            scores: list[float] = []
            parts, left_out = {}, 0
            for leaf, source in sources.items():
                # the file is in the key, because rows of one task may be in its own file and in its group's
                key = {"task": leaf, "rows": None if source.file is None else source.file.name}
                value = remember(
                    key, partial(_measure, model, tokenizer, leaf, source, length, limit, batch_size, chat, progress)
                )
                left_out += value["left_out"]
                if not value["scores"]:
                    continue
                scores += value["scores"]
                parts[leaf] = sum(value["scores"]) / len(value["scores"])
                result.metrics[leaf] = value["metrics"]
                result.replies.extend(value["replies"])
            if not scores:
                raise ValueError(
                    f"lm-eval's {name} has no document of up to {length} tokens with its answer: use a longer length."
                )
            result.accuracy[name] = sum(scores) / len(scores)
            result.parts[name], result.scores[name], result.left_out[name] = parts, scores, left_out
    return result


class _Source(NamedTuple):
    """Where the rows of a leaf task are.

    Args:
        file: file of the task, or of its group; None means the hub.
        examples: file of few-shot examples.
        group: name of the group if the files are a group's.
    """

    file: Path | None = None
    examples: Path | None = None
    group: str | None = None


def check_code(tasks: Sequence[str], confirmed: bool) -> None:
    """Raise ValueError if a task runs code that the model writes and this is not `confirmed`."""
    require_lm_eval()
    for leaf in (leaf for name in tasks for leaf in leaf_tasks(name)):
        if _runs_code(leaf) and not confirmed:
            raise ValueError(
                f"lm-eval's {leaf} may run the code that the model writes, on this machine. --confirm-run-unsafe-code, "
                "in Python confirm_run_unsafe_code=True, allows it: use it in a sandbox."
            )


def _runs_code(leaf: str) -> bool:
    return bool((task_index()[leaf].cfg or {}).get("unsafe_code"))


def check_tasks(tasks: Sequence[str], data: str | Path | None, length: int) -> None:
    """Raise, without a model, if `lm_eval_tasks` lacks a package, a task, a file, a field, a metric or the hub."""
    for sources in chosen_files(tasks, data).values():
        for leaf, source in sources.items():
            task = _task(leaf, source, 1, length)
            _metrics(task, leaf)
            with quiet(), _explained(leaf, source):
                task.build_all_requests(limit=1)
                task.doc_to_target(next(iter(task.eval_docs)))


def chosen_files(tasks: Sequence[str], data: str | Path | None) -> dict[str, dict[str, _Source]]:
    """Task, group or tag -> each of its leaf tasks -> where its rows are; arguments as in `lm_eval_tasks`."""
    require_lm_eval()
    chosen: dict[str, dict[str, _Source]] = {}
    for name in tasks:
        leaves = leaf_tasks(name)
        if data is None:
            chosen[name] = dict.fromkeys(leaves, _Source())
            continue
        is_group = leaves != [name]
        group_file = data_file(data, name) if is_group else None
        in_group = set() if group_file is None else _tasks_in(group_file, name)
        unknown = sorted(in_group - set(leaves))
        if unknown:
            raise ValueError(
                f"{group_file} has rows of {', '.join(unknown[:6])}, which are no tasks of lm-eval's {name}: a row "
                f"names its task in `task`, or as {name}_SUBJECT in `subject`. Its tasks: "
                f"{', '.join(leaves[:6])}{f' and {len(leaves) - 6} more' if len(leaves) > 6 else ''}."
            )
        chosen[name] = {}
        for leaf in leaves:
            file = data_file(data, leaf)
            if file is not None:
                _tasks_in(file, None)
                chosen[name][leaf] = _Source(file, data_file(data, f"{leaf}.fewshot"))
            elif leaf in in_group:
                chosen[name][leaf] = _Source(group_file, data_file(data, f"{name}.fewshot"), name)
        if not chosen[name]:
            names = f"{name}.jsonl, nor any of {', '.join(leaves[:6])}, ..." if is_group else f"{name}.jsonl"
            raise FileNotFoundError(f"{data} has no {names} as .jsonl or .jsonl.xz, for lm-eval's {name!r}.")
    return chosen


def leaf_tasks(name: str) -> list[str]:
    """The leaf tasks of a task, group or tag."""
    index = task_index()
    entry = index.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, [*SUGGESTED, *index], n=5)
        raise ValueError(
            f"lm-eval has no task {name!r}."
            + (f" Similar names: {', '.join(dict.fromkeys(near))}." if near else "")
            + f" It has {len(index)} names, among them {', '.join(s for s in SUGGESTED if s in index)}. "
            "`lm-eval ls tasks` lists all."
        )
    if entry.kind.name == "GROUP":
        members = [m if isinstance(m, str) else m.get("task", m.get("group")) for m in entry.cfg["task"]]
    elif entry.kind.name == "TAG":
        members = sorted(entry.tags)
    else:
        return [name]
    return list(dict.fromkeys(leaf for member in members for leaf in leaf_tasks(member)))


def _task_of(row: Mapping[str, Any], group: str) -> str:
    """The task that a row of a group's file belongs to."""
    return str(row.get("task", f"{group}_{row.get('subject')}"))


def _rows(file: Path, group: str | None, leaf: str) -> Iterator[Mapping[str, Any]]:
    return (row for row in read_json_lines(file) if group is None or _task_of(row, group) == leaf)


def _tasks_in(file: Path, group: str | None) -> set[str]:
    """The tasks in a group's file, or the name of a task's own file. Every line is read.

    A field that a row lacks raises: lm-eval would take it as empty without a warning.
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


def _task(leaf: str, source: _Source, limit: int | None, length: int) -> Any:
    """lm-eval's task, with up to `limit` documents."""
    overrides: dict[str, Any] = {}
    if _runs_code(leaf):  # `check_code` has asked
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
        overrides["unsafe_code"] = False
    with _explained(leaf, source):
        if source.file is None:
            if "babilong" in leaf:  # lm-eval's default is the shortest texts
                longest = max(k for k in _BABILONG if 1024 * k <= length)
                overrides["metadata"] = {"max_seq_lengths": f"{longest}k"}
            task = local_task(leaf, None, "test", shots=None, **overrides)
        else:
            documents = list(islice(_rows(source.file, source.group, leaf), limit))
            examples = None if source.examples is None else list(_rows(source.examples, source.group, leaf))
            task = local_task(leaf, documents, "test", examples=examples, shots=None, **overrides)
            if examples is not None and len(examples) < (task.config.num_fewshot or 0):
                raise ValueError(f"it needs {task.config.num_fewshot} examples, and there are {len(examples)}")
        if "ifeval" in leaf:
            _require_punkt(leaf)
        return task


def _require_punkt(leaf: str) -> None:
    """Raise ImportError if NLTK's data are missing that IFEval needs to score answers, after all are generated."""
    import nltk

    try:
        nltk.tokenize.PunktTokenizer("english")
    except LookupError as error:
        raise ImportError(
            f"lm-eval's {leaf} needs NLTK's data punkt_tab, which are not installed or incomplete: run "
            "python -m nltk.downloader punkt_tab once, with access to the network."
        ) from error


@contextmanager
def _explained(leaf: str, source: _Source) -> Iterator[None]:
    """Turn errors of lm-eval and datasets into errors that say what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        has_extra = leaf in metadata("lm_eval").get_all("Provides-Extra", [])
        package = f"'lm_eval[{leaf}]'" if has_extra else f"{error.name}, or lm-eval with the extra for this task"
        raise ImportError(
            f"lm-eval's {leaf} needs the package {error.name}, which is not installed: pip install {package}."
        ) from error
    except ImportError:
        raise
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
        if source.file is not None or "code_eval" in why:  # the metric of humaneval and mbpp is on the hub too
            raise OSError(f"lm-eval's {leaf} cannot load what it needs beside its data ({why}).") from error
        raise OSError(
            f"the data of lm-eval's {leaf} cannot be loaded from the hub ({why}): give a folder with {leaf}.jsonl in "
            "it, as --lm-eval-data or `data`."
        ) from error
    except Exception as error:  # from Jinja, datasets, lm-eval or a task's code: the task cannot read the rows
        if source.file is None:
            raise
        files = " or ".join(str(file) for file in (source.file, source.examples) if file is not None)
        fields = ", ".join(next(_rows(source.file, source.group, leaf)))
        raise ValueError(
            f"lm-eval's {leaf} cannot read {files} ({type(error).__name__}: {error}). Rows need the fields of the "
            f"task's dataset on the hub; these have {fields}."
        ) from error


def _metrics(task: Any, leaf: str) -> list[str]:
    """The metrics of a task that are scores of each sample and higher is better. Models are compared by the first.

    Tasks that run code have "pass_at_k" in front, which becomes "pass@1" once there are samples.
    """
    with quiet():
        from lm_eval.api.metrics import mean, median, nanmean
        from lm_eval.api.registry import AGGREGATION_REGISTRY

        # the other aggregations, such as perplexity, BLEU and F1, are computed from all samples together
        corpus_level = {AGGREGATION_REGISTRY.get(name) for name in AGGREGATION_REGISTRY} - {mean, median, nanmean}
    aggregations, higher_is_better = task.aggregation(), task.higher_is_better()
    names = [str(n) for n, a in aggregations.items() if higher_is_better.get(n) and a not in corpus_level]
    if names:
        return names
    raise ValueError(
        f"lm-eval's {leaf} has no metric that is a score of each sample and higher is better; it has "
        f"{', '.join(map(str, aggregations)) or 'none'}. Name another task, or measure this one with lm-eval alone."
    )


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
    """The stored result of a leaf task."""
    task = _task(leaf, source, limit, length)
    generates = task.config.output_type == "generate_until"
    with _explained(leaf, source):
        tokens = _document_tokens(task, tokenizer, limit, chat)
    documents = [doc for doc in sorted(tokens) if max(tokens[doc]) <= length]
    left_out = len(tokens) - len(documents)
    if not documents:
        return {"scores": [], "left_out": left_out, "metrics": {}, "replies": []}
    if generates and length > PREFILL_CHUNK:
        chunk = max(PREFILL_CHUNK // batch_size, 1)
        task.set_config("generation_kwargs", {"prefill_chunk_size": chunk}, update=True)
    with token_bar(model, sum(sum(tokens[doc]) for doc in documents), leaf, show=progress):
        ((metrics, logged),) = evaluate(
            model, tokenizer, [task], batch_size=batch_size, max_length=length, samples=documents, chat=chat
        )
    first = min(logged, key=lambda s: s["doc_id"])
    metric = next(name for name in _metrics(task, leaf) if name in first)
    reply = {
        "task": leaf,
        "question": str(first["arguments"][0][0])[-_SHOWN:],
        # IFEval checks instructions, and its targets are all 0; the target of code is a program that tests it
        "expected": "" if "ifeval" in leaf or _runs_code(leaf) else str(first["target"]),
        "reply": str(first["resps"][0][0]),
        "score": float(first[metric]),
    }
    return {
        "scores": sample_scores(logged, metric),
        "left_out": left_out,
        "metrics": metrics,
        "replies": [reply] if generates else [],
    }


def _document_tokens(
    task: Any, tokenizer: PreTrainedTokenizerBase, limit: int | None, chat: bool
) -> dict[int, list[int]]:
    """Document -> tokens of each of its prompts, as lm-eval makes them, with the answer and a token before the text."""

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

    with quiet():
        task.build_all_requests(limit=limit, apply_chat_template=chat, chat_template=through_template if chat else None)
    tokens: dict[int, list[int]] = {}
    for request in task.instances:
        prompt, answer = request.args  # the answer is a text, or the settings of its generation
        new = 0 if isinstance(answer, str) else answer.get("max_gen_toks", _NEW_TOKENS)
        text = prompt + answer if isinstance(answer, str) else prompt
        n = 1 + new + len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        tokens.setdefault(request.doc_id, []).append(n)
    return tokens


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
        confirm_run_unsafe_code=plan.confirm_run_unsafe_code,
        include=plan.lm_eval_include,
    )


def _check(plan: "EvalPlan", *_: object) -> None:
    with included_tasks(plan.lm_eval_include):
        check_code(plan.lm_eval, plan.confirm_run_unsafe_code)
        check_tasks(plan.lm_eval, plan.lm_eval_data, plan.length)


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
    files=("lm_eval_data", "lm_eval_include"),
    check=_check,
)
