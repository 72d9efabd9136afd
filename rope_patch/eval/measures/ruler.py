"""RULER's 13 tasks through lm-eval, without the network: the user's text as haystack, QA data from files."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
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
from ..results.progress import token_bar
from ..results.result import Pairs, Result
from .answer_positions import AnswerPositionAccuracy, accuracy_by_answer_position, draw_by_place
from .base import Job, Measure
from .harness import evaluate, local_task, quiet, quiet_import, require_lm_eval, sample_scores
from .retrieval_grid import RetrievalGrid
from .squad import of_form, read_squad

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..suite import EvalPlan

# task -> arguments of lm-eval's needle generator, as in its own task files
_NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_2": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"},
    "niah_multikey_1": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_k": 4,
    },
    "niah_multikey_2": {"type_haystack": "needle", "type_needle_k": "words", "type_needle_v": "numbers"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_v": 4,
    },
    "niah_multiquery": {
        "type_haystack": "essay",
        "type_needle_k": "words",
        "type_needle_v": "numbers",
        "num_needle_q": 4,
    },
}
_SEED = 42  # lm-eval's own
SHORTEST_LENGTH = 4096  # tokens that RULER begins at; its generators do not fill much shorter prompts
_VT_EXAMPLE = 500  # tokens of the example that lm-eval shows before a prompt of variable tracking
_FWE_SHORTEST = 200  # tokens: lm-eval draws a word for 50, and asks for the second to fourth by frequency
_SHOWN = 200  # characters of a prompt that are kept with its reply: its question
_OF_QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")
TASKS = (*_NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe", *_OF_QUESTIONS)
RulerPrompts = dict[tuple[int, str], list[dict[str, Any]]]
_NEEDS_TEXT = tuple(name for name, options in _NEEDLES.items() if options["type_haystack"] == "essay")


@dataclass(frozen=True)
class Ruler(Result):
    """RULER scores by task and length.

    Args:
        lengths: tokens of a prompt and its answer together.
        scores: task -> score at each length, 0 to 1.
        samples: prompts of each task and length that were asked for.
        answer_positions: of niah_multikey_2 at each length the accuracy by where the answer stands, as the curves of
            `AnswerPositionAccuracy`; empty without that task.
        prompt_scores: task -> at each length the score of each prompt; empty where it was not kept.
        replies: one of each task and length, as {task, length, question, expected, reply, score}.
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
        """Prompts of a task and length that were scored: a file with few questions gives fewer than were asked for."""
        of_lengths = self.prompt_scores.get(task)
        return len(of_lengths[self.lengths.index(length)]) if of_lengths else self.samples

    @property
    def by_answer_position(self) -> AnswerPositionAccuracy:
        """Accuracy of niah_multikey_2 by where the answer stands, a curve for each length."""
        return AnswerPositionAccuracy(self.answer_positions)

    def headline(self) -> dict[str, float]:
        return {f"RULER at {n}": self.mean(n) for n in self.lengths}

    def table(self) -> list[dict[str, Any]]:
        rows = [
            {"task": task, "length": n, "score": value, "samples": self.n_prompts(task, n)}
            for task, values in self.scores.items()
            for n, value in zip(self.lengths, values, strict=True)
        ]
        means = [
            {
                "task": "mean",
                "length": n,
                "score": self.mean(n),
                "samples": sum(self.n_prompts(task, n) for task in self.scores),
            }
            for n in self.lengths
        ]
        return rows + means

    def pairs(self, first: Self, window: int | None) -> list[Pairs]:
        return [
            Pairs(scores, dict(zip(self.lengths, self.prompt_scores[task], strict=True))[n], "prompts", n, task)
            for task in first.prompt_scores
            if task in self.prompt_scores
            for n, scores in zip(first.lengths, first.prompt_scores[task], strict=True)
            if n in self.lengths
        ]

    @classmethod
    def figure(cls, results: Mapping[str, Self]) -> "Figure":
        from ..results.figures import add_legend, compact, draw_bars, new_figure

        first = next(iter(results.values()))
        by_place = bool(first.answer_positions)
        figure, all_axes = new_figure(
            len(first.lengths), height=6.5 if by_place else 5.0, row_heights=(3, 1.5) if by_place else (1,)
        )
        for axes, length in zip(all_axes, first.lengths, strict=False):
            k = first.lengths.index(length)
            series = {label: [*(v[k] for v in r.scores.values()), r.mean(length)] for label, r in results.items()}
            draw_bars(axes, [*(t.removeprefix("ruler_").removeprefix("niah_") for t in first.scores), "mean"], series)
            axes.set(title=f"{compact(length)} tokens")
            axes.set_ylim(0, 1)
            axes.tick_params(axis="x", labelsize=6, rotation=90)
        all_axes[0].set_ylabel("score")
        if by_place:
            below = all_axes[len(first.lengths) :]
            for label, result in results.items():
                for axes, curve in zip(below, result.answer_positions, strict=False):
                    draw_by_place(axes, curve, label)
            below[0].set_ylabel("multikey_2 by place\nof the answer")
        add_legend(figure, all_axes[0])
        return figure

    @classmethod
    def readings(cls, results: Mapping[str, Self]) -> list[str]:
        said = []
        for label, result in results.items():
            means = ", ".join(f"{100 * result.mean(n):.1f} at {n}" for n in result.lengths)
            worst = min(result.scores, key=lambda t: result.scores[t][-1])
            said.append(
                f"{label}: mean {means} tokens; weakest at {result.lengths[-1]} is {worst} "
                f"({100 * result.scores[worst][-1]:.0f})."
            )
            said += result.by_answer_position.said(label)
        return said


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
    """Score RULER's tasks with lm-eval's own prompts, generators and metrics.

    lm-eval takes essays and QA data from the network, makes 500 prompts whatever the limit, and cuts prompts to the
    window in the config. Here the haystack is the user's text, QA data are files, `samples` prompts are made, and a
    prompt is read whole.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        lengths: tokens of a prompt and its answer together.
        tasks: names out of `rope_patch.eval.measures.ruler.TASKS`; None means all whose data are given.
        samples: prompts of each task and length; RULER takes 500.
        haystack: text in place of the essays; needed by the five tasks that hide needles in running text.
        squad: SQuAD's own JSON file, or .jsonl(.xz, .gz) with `title`, `context` and `qas` [question, answers].
        hotpotqa: HotpotQA's own JSON file, or .jsonl(.xz, .gz) with `question`, `answer`, `context` [title, sentences].
        batch_size: prompts held in memory and answered at once, at most; None means as many as fit.
        chat_template: whether the model is asked through the tokenizer's chat template: "on", "off", or "auto", if
            there is one. Lengths include it.
        progress: whether to show a bar over tasks and lengths.
        remember: keeps each task and length as soon as it is done.
        prompts: those of `ruler_prompts` of the same lengths, samples and chat_template, all of which are asked, in
            place of tasks and their data; several models can be asked the same. None makes them.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown task, or one whose data were not given.

    Source: RULER, arXiv:2404.06654.
    """
    require_lm_eval()
    chat = uses_chat_template(tokenizer, chat_template)
    # all prompts first: what cannot be made at some length shows before anything is measured
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
    scores: dict[str, list[float]] = {task: [] for task in chosen}
    prompt_scores: dict[str, list[list[float]]] = {task: [] for task in chosen}
    replies: list[dict[str, Any]] = []
    positions: list[dict[str, Any]] = []
    cells = [(length, task) for length in lengths for task in chosen]
    for n, task in tqdm(cells, desc="RULER", unit="task", disable=not progress):

        def score(n: int = n, task: str = task) -> dict[str, Any]:
            tokens = n * len(documents[n, task])
            with token_bar(model, tokens, f"{task} at {n}", show=progress):
                mean, logged = _score(model, tokenizer, task, documents[n, task], n, batch_size, chat)
            curve = _by_position(logged, n) if task == "niah_multikey_2" else None
            of_each = sample_scores(logged, "score")
            return {"score": mean, "answer_positions": curve, "scores": of_each, "reply": _example(task, n, logged)}

        result = remember({"task": task, "length": n}, score)
        scores[task].append(result["score"])
        prompt_scores[task].append(result["scores"])
        replies.append(result["reply"])
        if result["answer_positions"] is not None:
            positions.append(result["answer_positions"])
    return Ruler(list(lengths), scores, samples, positions, prompt_scores, replies)


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
    """The prompts that `ruler` makes of the same arguments: making many long ones takes minutes.

    Returns:
        (length, task) -> lm-eval's documents, which JSON can hold.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown task, or one whose data were not given.
    """
    require_lm_eval()
    chosen = chosen_tasks(tasks, haystack=haystack, squad=squad, hotpotqa=hotpotqa)
    beside = Frame.of(tokenizer, uses_chat_template(tokenizer, chat_template)).tokens
    cells = [(length, task) for length in lengths for task in chosen]
    return {
        (n, task): _documents(task, tokenizer, n, beside, samples, haystack, squad, hotpotqa)
        for n, task in tqdm(cells, desc="RULER prompts", unit="task", disable=not progress)
    }


def chosen_tasks(tasks: Sequence[str] | None, *, haystack: object, squad: object, hotpotqa: object) -> list[str]:
    """Names of the tasks that are measured; arguments as in `ruler`.

    Raises:
        ValueError: an unknown task, or one whose data were not given or are of another form.
        OSError: there is no such file.
    """
    sources = {"ruler_qa_squad": squad, "ruler_qa_hotpot": hotpotqa, **dict.fromkeys(_NEEDS_TEXT, haystack)}
    chosen = list(tasks) if tasks is not None else [t for t in TASKS if sources.get(t, "none needed") is not None]
    for task in chosen:
        if task not in TASKS:
            raise ValueError(f"unknown RULER task {task!r}. Known: {', '.join(TASKS)}.")
        if sources.get(task, "none needed") is None:
            argument = {"ruler_qa_squad": "squad", "ruler_qa_hotpot": "hotpotqa"}.get(task, "haystack")
            raise ValueError(f"RULER's {task} needs {argument}: give it, or leave the task out.")
    for task, read, file in (("ruler_qa_squad", _squad, squad), ("ruler_qa_hotpot", _hotpotqa, hotpotqa)):
        if task in chosen:
            read(Path(str(file)))  # raises for a file of another form
    return chosen


def _documents(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    beside: int,
    samples: int,
    haystack: str | None,
    squad: str | Path | None,
    hotpotqa: str | Path | None,
) -> list[dict[str, Any]]:
    """lm-eval's prompts of one task and length, `beside` tokens of which are put around a prompt."""
    room = length - beside
    with _too_short_named(task, length), _generators() as lm_eval:
        if task in _NEEDLES:
            options = _NEEDLES[task]
            kind = options["type_haystack"]
            essay = kind == "essay"
            return lm_eval.prepare_niah.generate_samples(
                re.sub(r"\s+", " ", haystack or "").split(" ") if essay else lm_eval.prepare_niah.get_haystack(kind),
                max_seq_length=room,
                template=lm_eval.niah_utils.TEMPLATE,
                num_samples=samples,
                TOKENIZER=tokenizer,
                **options,
            )
        if task == "ruler_vt":
            make = lm_eval.vt_utils.sys_vartrack_w_noise_random
            _require_room(task, tokenizer, _VT_EXAMPLE, lm_eval.vt_utils, (5, 1, 4, True), 30)
            (example,) = make(tokenizer=tokenizer, num_samples=1, max_seq_length=_VT_EXAMPLE, incremental=5)
            shown = f"{example['input']} {' '.join(example['outputs'])}\n\n"
            _require_room(task, tokenizer, length, lm_eval.vt_utils, (10, 1, 4), 30 + beside, shown)
            return make(tokenizer=tokenizer, num_samples=samples, max_seq_length=room, icl_example=example)
        if task == "ruler_cwe":
            _require_room(task, tokenizer, length, lm_eval.cwe_utils, (10, room), 120 + beside)
            return lm_eval.cwe_utils.sys_word_pair_random(num_samples=samples, max_seq_length=room, tokenizer=tokenizer)
        if task == "ruler_fwe":
            empty = lm_eval.fwe_utils.TEMPLATE.format(context="", query="")
            _require_tokens(task, length, beside + max(_FWE_SHORTEST, len(tokenizer(empty)["input_ids"])))
            return lm_eval.fwe_utils.sys_kwext(tokenizer=tokenizer, max_seq_length=room, num_samples=samples)
        qas, docs = _squad(Path(squad or "")) if task == "ruler_qa_squad" else _hotpotqa(Path(hotpotqa or ""))
        return lm_eval.qa_utils.generate_samples(
            tokenizer=tokenizer, docs=docs, qas=qas, max_seq_length=room, num_samples=min(samples, len(qas))
        )


def _require_room(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    generator: Any,
    least: tuple[int, ...],
    more: int,
    shown: str = "",
) -> None:
    """Raise ValueError unless the shortest prompt of a generator fits: where it does not, lm-eval looks for ever.

    Args:
        task: its name.
        tokenizer: of the model.
        length: tokens that prompt and answer may have.
        generator: lm-eval's module of the task.
        least: what it makes its shortest prompt of.
        more: tokens of an answer, and of what is put around a prompt.
        shown: an example that stands before the prompt.
    """
    drawn, drawn_words = random.getstate(), getattr(generator, "RNG", random).getstate()
    parts = generator.generate_input_output(*least)
    getattr(generator, "RNG", random).setstate(drawn_words)
    random.setstate(drawn)  # lm-eval draws the same prompt first
    prompt = "\n".join([*parts[:-1], " ".join(map(str, parts[-1]))])
    needed = more + sum(len(tokenizer(text)["input_ids"]) for text in (prompt, shown) if text)
    _require_tokens(task, length, needed)


def _require_tokens(task: str, length: int, needed: int) -> None:
    if needed > length:
        raise ValueError(
            f"{length} tokens are too few for RULER's {task}, which takes {needed} with its answer: use "
            "a longer length, or leave the task out."
        )


def _score(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    documents: list[dict[str, Any]],
    length: int,
    batch_size: int | None,
    chat: bool,
) -> tuple[float, list[dict[str, Any]]]:
    with quiet():
        from lm_eval.tasks.ruler import common_utils

        metric = common_utils.string_match_part if "qa" in task else common_utils.string_match_all

        def score(doc: dict[str, Any], replies: list[str]) -> dict[str, float]:
            return {"score": metric(common_utils.postprocess_pred(replies), [doc["outputs"]])}

        # one metric: lm-eval's own tasks report every length in a fixed list, -1 where nothing was measured
        ours = [{"metric": "score", "aggregation": "mean", "higher_is_better": True}]
        new_tokens = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}.get(task, 32 if "qa" in task else 128)
        generation = {"do_sample": False, "temperature": 0.0, "max_gen_toks": new_tokens, "until": []}
        loaded = local_task(
            task, documents, "test", process_results=score, metric_list=ours, generation_kwargs=generation
        )
    metrics, logged = evaluate(
        model, tokenizer, loaded, batch_size=batch_size, max_length=length + new_tokens, chat=chat, greedy=True
    )
    return float(metrics["score,none"]), logged


def _example(task: str, length: int, logged: list[dict[str, Any]]) -> dict[str, Any]:
    """The first sample that was asked."""
    sample = min(logged, key=lambda s: s["doc_id"])
    return {
        "task": task,
        "length": length,
        "question": sample["doc"]["input"][-_SHOWN:],
        "expected": ", ".join(map(str, sample["doc"]["outputs"])),
        "reply": sample["resps"][0][0],
        "score": float(sample["score"]),
    }


def _by_position(logged: list[dict[str, Any]], length: int) -> dict[str, Any]:
    places = [s["doc"]["input"].index(s["doc"]["outputs"][0]) / len(s["doc"]["input"]) for s in logged]
    scores = [s["score"] for s in logged]
    grid = RetrievalGrid("niah_multikey_2", [length], [0.5], [scores], len(scores), places, scores)
    return accuracy_by_answer_position(grid).curves[0]


def _squad(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions and paragraphs as lm-eval's generator takes them, from SQuAD's own JSON or from JSON lines."""
    paragraphs = read_squad(file)
    docs = sorted({p.text for p in paragraphs})
    place = {c: i for i, c in enumerate(docs)}
    titles: dict[str, list[int]] = {}
    for p in paragraphs:
        titles.setdefault(p.title, []).append(place[p.text])
    qas = []
    for p in paragraphs:
        paragraph = place[p.text]
        for question, answers in p.questions:
            more = [i for i in titles[p.title] if i != paragraph]
            qas.append({"query": question, "outputs": answers, "context": [paragraph], "more_context": more})
    if not qas:
        raise ValueError(f"{file} has no question with an answer.")
    return qas, docs


def _hotpotqa(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Questions and paragraphs as lm-eval's generator takes them, from HotpotQA's own JSON or from JSON lines."""

    def texts(item: dict[str, Any]) -> list[str]:
        return [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]

    with of_form(file, "HotpotQA's own JSON file, or JSON lines with question, answer and context"):
        items: list[Any] = (
            list(read_json_lines(file)) if is_json_lines(file) else read_json(file.read_text(encoding="utf-8"))
        )
        docs = sorted({text for item in items for text in texts(item)})
        place = {text: i for i, text in enumerate(docs)}
        questions = [
            {"query": i["question"], "outputs": [i["answer"]], "context": [place[t] for t in texts(i)]} for i in items
        ]
    if not questions:
        raise ValueError(f"{file} has no questions.")
    return questions, docs


@contextmanager
def _too_short_named(task: str, length: int) -> Iterator[None]:
    """lm-eval's error of a length that is too short, which names arguments that are not ours, as one of ours."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Could not generate"):
            raise
        raise ValueError(
            f"{length} tokens are too few for RULER's {task} with its answer: use a longer length, such as "
            f"{SHORTEST_LENGTH}, at which RULER begins, or leave the task out."
        ) from error


@contextmanager
def _generators() -> Iterator[Any]:
    """lm-eval's generator modules, made repeatable and offline; everything is put back.

    Sentences are split by punctuation, since NLTK's splitter needs a download and places of needles need no better one.
    Bars of each task and length give way to ours over all.
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
    drawn, drawn_words = random.getstate(), cwe_utils.RNG.getstate()
    for m, name, value in replaced:
        setattr(m, name, value)
    random.seed(_SEED)
    cwe_utils.RNG.seed(_SEED)
    try:
        with redirect_stdout(StringIO()):  # one of them prints how it searches
            yield SimpleNamespace(**modules)
    finally:
        random.setstate(drawn)
        cwe_utils.RNG.setstate(drawn_words)
        for (m, name, _), value in zip(replaced, before, strict=True):
            setattr(m, name, value)


def _data(plan: "EvalPlan", texts: list[str]) -> dict[str, Any]:
    """What of a plan RULER's prompts are made of."""
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
        **_data(plan, job.texts),
    )


def _check(plan: "EvalPlan", tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    shortest = min(plan.ruler_lengths or plan.lengths, default=0)
    ruler_prompts(tokenizer, [shortest], samples=1, progress=False, **_data(plan, texts))


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
