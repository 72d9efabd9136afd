"""RULER's 13 tasks through lm-eval, without the network: your text as haystack, and QA data from files."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ...prompts.asking import ChatTemplate, Frame, uses_chat_template
from ...prompts.text import is_json_lines, read_json, read_json_lines
from ..results.cache import Remember, afresh
from ..results.figures import Figure, add_legend, compact, draw_bars, new_figure
from ..results.progress import token_bar
from ..results.result import Pairs, Result
from .answer_positions import AnswerPositionAccuracy, accuracy_by_answer_position, draw_by_place
from .base import Job, Measure
from .harness import evaluate, local_task, quiet, quiet_import, require_lm_eval, sample_scores
from .retrieval_grid import RetrievalGrid
from .squad import read_squad, readable

if TYPE_CHECKING:
    from ..suite import EvalPlan


def _needles(haystack: str, key: str = "words", value: str = "numbers", **numbers: int) -> dict[str, Any]:
    """Arguments of lm-eval's needle generator."""
    return {"type_haystack": haystack, "type_needle_k": key, "type_needle_v": value, **numbers}


# the arguments are those of lm-eval's task files
_NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": _needles("repeat"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", value="uuids"),
    "niah_multikey_1": _needles("essay", num_needle_k=4),
    "niah_multikey_2": _needles("needle"),
    "niah_multikey_3": _needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": _needles("essay", num_needle_v=4),
    "niah_multiquery": _needles("essay", num_needle_q=4),
}
_SEED = 42  # lm-eval's
SHORTEST_LENGTH = 4096
"""RULER's shortest length, in tokens; its generators cannot fill much shorter prompts."""
_VT_EXAMPLE = 500  # tokens of the example that lm-eval puts before a prompt of variable tracking
_FWE_SHORTEST = 200  # lm-eval draws one word for 50 tokens, and the prompt asks for the first three by frequency
_SHOWN = 200  # characters at the end of a prompt that are stored with its reply: its question
TASKS = (*_NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot")
# task -> the argument of `ruler` that it needs
_NEEDS = {
    **{name: "haystack" for name, options in _NEEDLES.items() if options["type_haystack"] == "essay"},
    "ruler_qa_squad": "squad",
    "ruler_qa_hotpot": "hotpotqa",
}
RulerPrompts = dict[tuple[int, str], list[dict[str, Any]]]
"""(length, task) -> lm-eval's documents."""


@dataclass(frozen=True)
class Ruler(Result):
    """RULER scores by task and length.

    Args:
        lengths: tokens of a prompt and its answer together.
        scores: task -> [n_lengths], mean score, 0 to 1.
        samples: requested number of prompts of each task and length.
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
        """Number of scored prompts, which is less than `samples` if a file has fewer questions."""
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
            Pairs(scores, self.prompt_scores[task][self.lengths.index(n)], "prompts", n, task)
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
    lengths: Sequence[int],
    *,
    tasks: Sequence[str] | None = None,
    samples: int = 100,
    haystack: str | None = None,
    squad: str | Path | None = None,
    hotpotqa: str | Path | None = None,
    batch_size: int | None = None,
    chat_template: ChatTemplate = "auto",
    progress: bool = True,
    remember: Remember = afresh,
    prompts: RulerPrompts | None = None,
) -> Ruler:
    """Score RULER's tasks with lm-eval's prompts, generators and metrics.

    lm-eval takes essays and QA data from the network, makes 500 prompts whatever the limit, and cuts prompts to the
    window in the config. Here the haystack is your text, QA data are files, `samples` prompts are made, and no prompt
    is truncated.

    Args:
        model: a causal LM.
        tokenizer: tokenizer of the model.
        lengths: tokens of a prompt and its answer together.
        tasks: names from `rope_patch.eval.measures.ruler.TASKS`; None means all whose data are given.
        samples: prompts of each task and length; RULER takes 500.
        haystack: text in place of the essays, for the five tasks that hide needles in running text.
        squad: SQuAD's JSON file, or .jsonl(.xz, .gz) with `title`, `context` and `qas` [question, answers].
        hotpotqa: HotpotQA's JSON file, or .jsonl(.xz, .gz) with `question`, `answer`, `context` [title, sentences].
        batch_size: maximum number of prompts in memory and answered at once; None means as many as fit.
        chat_template: whether to use the tokenizer's chat template: "on", "off", or "auto", if there is one. Lengths
            include it.
        progress: whether to show a bar over tasks and lengths.
        remember: stores each task and length as soon as it is done.
        prompts: prompts from `ruler_prompts` with the same lengths, samples and chat_template, in place of tasks and
            their data, so that several models get the same ones. None makes them.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown task, or a task whose data were not given.

    Source: RULER, arXiv:2404.06654.
    """
    require_lm_eval()
    chat = uses_chat_template(tokenizer, chat_template)
    # all prompts are made first, so that a length that is too short raises before anything is measured
    documents = prompts or ruler_prompts(
        tokenizer,
        lengths,
        tasks=tasks,
        samples=samples,
        haystack=haystack,
        squad=squad,
        hotpotqa=hotpotqa,
        chat_template=chat_template,
        progress=progress,
    )
    chosen = list(dict.fromkeys(task for _, task in documents))
    result = Ruler(list(lengths), {task: [] for task in chosen}, samples, [], {task: [] for task in chosen}, [])
    cells = [(length, task) for length in lengths for task in chosen]
    for n, task in tqdm(cells, desc="RULER", unit="task", disable=not progress):
        measure = partial(_measure, model, tokenizer, task, documents[n, task], n, batch_size, chat, progress)
        value = remember({"task": task, "length": n}, measure)
        result.scores[task].append(value["score"])
        result.prompt_scores[task].append(value["scores"])
        result.replies.append(value["reply"])
        if value["answer_positions"] is not None:
            result.answer_positions.append(value["answer_positions"])
    return result


def ruler_prompts(
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    *,
    tasks: Sequence[str] | None = None,
    samples: int = 100,
    haystack: str | None = None,
    squad: str | Path | None = None,
    hotpotqa: str | Path | None = None,
    chat_template: ChatTemplate = "auto",
    progress: bool = True,
) -> RulerPrompts:
    """The prompts of `ruler`, with the same arguments. Making many long prompts takes minutes.

    Returns:
        (length, task) -> lm-eval's documents, as JSON values.
    """
    require_lm_eval()
    data = {"haystack": haystack, "squad": squad, "hotpotqa": hotpotqa}
    chosen = chosen_tasks(tasks, **data)
    frame = Frame.of(tokenizer, uses_chat_template(tokenizer, chat_template)).tokens
    cells = [(length, task) for length in lengths for task in chosen]
    return {
        (n, task): _documents(task, tokenizer, n, frame, samples, data.get(_NEEDS.get(task, "")))
        for n, task in tqdm(cells, desc="RULER prompts", unit="task", disable=not progress)
    }


def chosen_tasks(tasks: Sequence[str] | None, **data: Any) -> list[str]:
    """Names of the tasks that are measured; `data` are haystack, squad and hotpotqa, as in `ruler`."""
    chosen = [t for t in TASKS if t not in _NEEDS or data[_NEEDS[t]] is not None] if tasks is None else list(tasks)
    for task in chosen:
        if task not in TASKS:
            raise ValueError(f"unknown RULER task {task!r}. Known: {', '.join(TASKS)}.")
        if task in _NEEDS and data[_NEEDS[task]] is None:
            raise ValueError(f"RULER's {task} needs {_NEEDS[task]}: give it, or leave the task out.")
        if task in _QA:
            _QA[task](Path(data[_NEEDS[task]]))  # raises for a file of another form
    return chosen


def _documents(
    task: str, tokenizer: PreTrainedTokenizerBase, length: int, frame: int, samples: int, source: str | Path | None
) -> list[dict[str, Any]]:
    """lm-eval's documents of one task and length, made from `source`; `frame` tokens stand around each prompt."""
    room = length - frame
    with _generators(task, length) as lm_eval:
        if task in _NEEDLES:
            kind = _NEEDLES[task]["type_haystack"]
            essay = re.sub(r"\s+", " ", str(source)).split(" ")
            return lm_eval.prepare_niah.generate_samples(
                essay if kind == "essay" else lm_eval.prepare_niah.get_haystack(kind),
                max_seq_length=room,
                template=lm_eval.niah_utils.TEMPLATE,
                num_samples=samples,
                TOKENIZER=tokenizer,
                **_NEEDLES[task],
            )
        if task == "ruler_vt":
            make = lm_eval.vt_utils.sys_vartrack_w_noise_random
            _require_room(task, tokenizer, _VT_EXAMPLE, lm_eval.vt_utils, (5, 1, 4, True), 30)
            (example,) = make(tokenizer=tokenizer, num_samples=1, max_seq_length=_VT_EXAMPLE, incremental=5)
            shown = f"{example['input']} {' '.join(example['outputs'])}\n\n"
            _require_room(task, tokenizer, length, lm_eval.vt_utils, (10, 1, 4), 30 + frame, shown)
            return make(tokenizer=tokenizer, num_samples=samples, max_seq_length=room, icl_example=example)
        if task == "ruler_cwe":
            _require_room(task, tokenizer, length, lm_eval.cwe_utils, (10, room), 120 + frame)
            return lm_eval.cwe_utils.sys_word_pair_random(num_samples=samples, max_seq_length=room, tokenizer=tokenizer)
        if task == "ruler_fwe":
            empty = lm_eval.fwe_utils.TEMPLATE.format(context="", query="")
            _require_tokens(task, length, frame + max(_FWE_SHORTEST, len(tokenizer(empty)["input_ids"])))
            return lm_eval.fwe_utils.sys_kwext(tokenizer=tokenizer, max_seq_length=room, num_samples=samples)
        qas, docs = _QA[task](Path(source or ""))
        return lm_eval.qa_utils.generate_samples(
            tokenizer=tokenizer, docs=docs, qas=qas, max_seq_length=room, num_samples=min(samples, len(qas))
        )


@contextmanager
def _generators(task: str, length: int) -> Iterator[Any]:
    """lm-eval's generator modules, repeatable and offline inside the block, without their progress bars.

    Sentences are split by punctuation: NLTK's splitter needs a download, and the places of needles do not need a better
    one. Prompts that do not fit in `length` raise ValueError.
    """
    with quiet_import():
        from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils
    modules: dict[str, Any] = {
        m.__name__.rpartition(".")[2]: m for m in (cwe_utils, fwe_utils, niah_utils, prepare_niah, qa_utils, vt_utils)
    }
    split = lru_cache(maxsize=4)(lambda text: re.split(r"(?<=[.!?])\s+", text))
    replaced = [(m, "tqdm", lambda items, **_: items) for m in modules.values() if hasattr(m, "tqdm")]
    replaced.append((prepare_niah, "cached_sent_tokenize", split))
    before = [getattr(m, name) for m, name, _ in replaced]
    states = random.getstate(), cwe_utils.RNG.getstate()
    for m, name, value in replaced:
        setattr(m, name, value)
    random.seed(_SEED)
    cwe_utils.RNG.seed(_SEED)
    try:
        with redirect_stdout(StringIO()):  # one of them prints its search for a length
            yield SimpleNamespace(**modules)
    except ValueError as error:
        if not str(error).startswith("Could not generate"):
            raise
        # lm-eval's error names arguments that users of `ruler` do not have
        raise ValueError(
            f"{length} tokens are too few for RULER's {task} with its answer: use a longer length, such as "
            f"{SHORTEST_LENGTH}, RULER's shortest, or leave the task out."
        ) from error
    finally:
        random.setstate(states[0])
        cwe_utils.RNG.setstate(states[1])
        for (m, name, _), value in zip(replaced, before, strict=True):
            setattr(m, name, value)


def _require_room(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    generator: Any,
    least: tuple[int, ...],
    more: int,
    shown: str = "",
) -> None:
    """Raise ValueError unless a generator's shortest prompt fits; otherwise lm-eval would search forever.

    `least` are the arguments of its shortest prompt, `more` the tokens of the answer and around the prompt, and `shown`
    is an example before the prompt.
    """
    rng = getattr(generator, "RNG", random)
    states = random.getstate(), rng.getstate()
    parts = generator.generate_input_output(*least)
    rng.setstate(states[1])
    random.setstate(states[0])  # so that lm-eval's own first draw is the same
    prompt = "\n".join([*parts[:-1], " ".join(map(str, parts[-1]))])
    _require_tokens(task, length, more + sum(len(tokenizer(text)["input_ids"]) for text in (prompt, shown) if text))


def _require_tokens(task: str, length: int, needed: int) -> None:
    if needed > length:
        raise ValueError(
            f"{length} tokens are too few for RULER's {task}, which takes {needed} with its answer: use a longer "
            "length, or leave the task out."
        )


def _measure(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    documents: list[dict[str, Any]],
    length: int,
    batch_size: int | None,
    chat: bool,
    progress: bool,
) -> dict[str, Any]:
    """The stored result of one task and length."""
    with quiet():
        from lm_eval.tasks.ruler import common_utils

        metric = common_utils.string_match_part if "qa" in task else common_utils.string_match_all

        def score(doc: dict[str, Any], replies: list[str]) -> dict[str, float]:
            return {"score": metric(common_utils.postprocess_pred(replies), [doc["outputs"]])}

        new_tokens = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}.get(task, 32 if "qa" in task else 128)
        loaded = local_task(
            task,
            documents,
            "test",
            process_results=score,
            # lm-eval's tasks have a metric for each of a fixed list of lengths, -1 where nothing was measured
            metric_list=[{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
            generation_kwargs={"do_sample": False, "temperature": 0.0, "max_gen_toks": new_tokens, "until": []},
        )
    with token_bar(model, length * len(documents), f"{task} at {length}", show=progress):
        metrics, logged = evaluate(
            model, tokenizer, loaded, batch_size=batch_size, max_length=length + new_tokens, chat=chat, greedy=True
        )
    curve = None
    if task == "niah_multikey_2":
        places = [s["doc"]["input"].index(s["doc"]["outputs"][0]) / len(s["doc"]["input"]) for s in logged]
        scores = [s["score"] for s in logged]
        grid = RetrievalGrid(task, [length], [0.5], [scores], len(scores), places, scores)
        curve = accuracy_by_answer_position(grid).curves[0]
    first = min(logged, key=lambda s: s["doc_id"])
    return {
        "score": metrics["score"],
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


def _squad(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions and paragraphs for lm-eval's generator, from SQuAD's JSON file or from JSON lines."""
    paragraphs = read_squad(file)
    docs = sorted({p.text for p in paragraphs})
    index = {text: i for i, text in enumerate(docs)}
    by_title: dict[str, list[int]] = {}
    for p in paragraphs:
        by_title.setdefault(p.title, []).append(index[p.text])
    questions = []
    for p in paragraphs:
        more = [i for i in by_title[p.title] if i != index[p.text]]
        for question, answers in p.questions:
            questions.append({"query": question, "outputs": answers, "context": [index[p.text]], "more_context": more})
    if not questions:
        raise ValueError(f"{file} has no question with an answer.")
    return questions, docs


def _hotpotqa(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions and paragraphs for lm-eval's generator, from HotpotQA's JSON file or from JSON lines."""

    def texts(item: dict[str, Any]) -> list[str]:
        return [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]

    with readable(file, "HotpotQA's own JSON file, or JSON lines with question, answer and context"):
        items: list[Any] = (
            list(read_json_lines(file)) if is_json_lines(file) else read_json(file.read_text(encoding="utf-8"))
        )
        docs = sorted({text for item in items for text in texts(item)})
        index = {text: i for i, text in enumerate(docs)}
        questions = [
            {"query": i["question"], "outputs": [i["answer"]], "context": [index[t] for t in texts(i)]} for i in items
        ]
    if not questions:
        raise ValueError(f"{file} has no questions.")
    return questions, docs


_QA = {"ruler_qa_squad": _squad, "ruler_qa_hotpot": _hotpotqa}


def _prompt_options(plan: "EvalPlan", texts: list[str]) -> dict[str, Any]:
    """The arguments of `ruler` and `ruler_prompts` that choose prompts."""
    return {
        "tasks": plan.ruler_tasks,
        "haystack": "\n".join(texts),
        "squad": plan.squad,
        "hotpotqa": plan.hotpotqa,
        "chat_template": plan.chat_template,
    }


def _measured(job: Job) -> Ruler:
    plan = job.plan
    return ruler(
        job.model,
        job.tokenizer,
        plan.ruler_lengths or plan.lengths,
        samples=plan.ruler_samples,
        batch_size=plan.batch_size,
        remember=job.remember,
        **_prompt_options(plan, job.texts),
    )


def _check(plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    shortest = min(plan.ruler_lengths or plan.lengths, default=0)
    ruler_prompts(tokenizer, [shortest], samples=1, progress=False, **_prompt_options(plan, texts))


RULER = Measure(
    name="ruler",
    result=Ruler,
    run=_measured,
    help="RULER's 13 long-context tasks, through lm-eval",
    asks=True,
    settings=("ruler_samples", "chat_template"),
    parts=("lengths", "ruler_lengths", "ruler_tasks"),
    files=("squad", "hotpotqa"),
    check=_check,
)
