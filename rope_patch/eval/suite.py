"""Several measurements of several models in one go, each kept on disk as soon as it is done."""

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..describe import describe
from ..generation.subject import Subject
from ..layout.special_tokens import SpecialTokens
from ..prompts.asking import ChatTemplate, uses_chat_template
from ..prompts.needles import KINDS, Kind
from ..prompts.text import text_rows
from .measures.answer_positions import AnswerPositionAccuracy, accuracy_by_answer_position
from .measures.attention import (
    LAST,
    AttentionDistance,
    EntropyRatio,
    attention_distance,
    entropy_ratio,
    require_recomputable_attention,
)
from .measures.comparisons import baseline_first
from .measures.context_gain import SHORT, ContextGain, context_gain
from .measures.harness import require_lm_eval
from .measures.lm_eval_tasks import LmEval, check_tasks, lm_eval_tasks
from .measures.loss_by_position import FIRST_POSITION, LossByPosition, loss_by_position
from .measures.prompt_grid import DEPTHS, check_retrieval, shortest_prompt
from .measures.retrieval import retrieval
from .measures.retrieval_grid import RetrievalGrid
from .measures.ruler import Ruler, ruler, ruler_prompts
from .measures.short_text import ShortText, chosen_benchmarks, short_text
from .measures.view_kl import ViewKL, view_kl
from .results.cache import Remember, ResultCache, data_hash, files_hash, model_hash
from .results.progress import tell
from .results.result import Result
from .results.tokenizer_identity import tokenizer_hash
from .vllm_backend import check_vllm, vllm_answers, vllm_version

Backend = Literal["transformers", "vllm"]

Results = dict[str, dict[str, Result]]
"""Measure -> label of the model -> result, as `run_suite` returns it and `write_report` takes it."""


@dataclass(frozen=True)
class EvalPlan:
    """What is measured, on how much; equal plans on equal models and text are found in the cache.

    Args:
        measures: names out of `MEASURES`, in this order.
        length: tokens in the longest row.
        n_rows: held-out rows for loss by position, context gain, attention and view KL.
        lengths: prompt lengths for retrieval.
        ruler_lengths: the same for RULER; None means `lengths`.
        trials: retrieval prompts a cell.
        depths: places of the needle, 0 the start of the text and 1 its end.
        ruler_tasks: None means all whose data are given.
        ruler_samples: prompts of each RULER task and length.
        squad: file for RULER's first QA task.
        hotpotqa: file for RULER's second QA task.
        short_data: folder of short-text benchmarks; None means the hub's.
        benchmarks: short-text benchmarks; None means all that there are.
        limit: samples of each short-text benchmark and of each of lm-eval's tasks.
        lm_eval: lm-eval's tasks, by its names.
        lm_eval_data: folder of their data; None means the hub.
        batch_size: prompts answered at once, at most, and a quarter of the short requests in a forward; None means as
            many prompts as memory holds, 4 of lm-eval's tasks, and 16 short requests.
        seed: of retrieval prompts.
        chat_template: whether retrieval, RULER, short text and lm-eval's tasks are asked through the tokenizer's chat
            template: "on", "off", or "auto", if there is one, as `short_text` has it.
        window: positions over which all models are compared, within and beyond; None means the trained window of the
            first model.
        backend: who answers retrieval prompts, "transformers" or "vllm"; all other measures are Transformers'.
    """

    measures: tuple[str, ...]
    length: int
    n_rows: int = 4
    lengths: tuple[int, ...] = ()
    ruler_lengths: tuple[int, ...] | None = None
    trials: int = 2
    depths: tuple[float, ...] = DEPTHS
    ruler_tasks: tuple[str, ...] | None = None
    ruler_samples: int = 20
    squad: str | None = None
    hotpotqa: str | None = None
    short_data: str | None = None
    benchmarks: tuple[str, ...] | None = None
    limit: int | None = None
    lm_eval: tuple[str, ...] = ()
    lm_eval_data: str | None = None
    batch_size: int | None = None
    seed: int = 0
    chat_template: ChatTemplate = "auto"
    window: int | None = None
    backend: Backend = "transformers"

    def __post_init__(self) -> None:
        for name in self.measures:
            if name not in MEASURES:
                raise ValueError(f"unknown measure {name!r}. Known: {', '.join(MEASURES)}.")
        before = list(self.measures)[: self.measures.index("position")] if "position" in self.measures else None
        if before is not None and not any(_kind_of(name) for name in before):
            raise ValueError("position is read off the answers to retrieval prompts: name passkey or a niah before it.")
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {self.backend!r}.")

    @property
    def kinds(self) -> list[Kind]:
        """Of the retrieval prompts that are asked."""
        kinds = [_kind_of(name) for name in self.measures]
        return [kind for kind in kinds if kind is not None]

    @property
    def asks(self) -> bool:
        """Whether questions are asked, through the chat template if it says so."""
        return bool(self.kinds) or bool({"ruler", "short", "lm-eval"} & set(self.measures))

    @property
    def reads_attention(self) -> bool:
        """Whether attention is recomputed, which `require_recomputable_attention` refuses for some models."""
        return bool({"attention", "entropy"} & set(self.measures))

    def check(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
        """Raise what a measure would raise for want of a package, a file, a name or enough text, without a model."""
        self.check_rows(self.window)
        uses_chat_template(tokenizer, self.chat_template)
        if {"ruler", "short"} & set(self.measures):
            require_lm_eval()
        if "ruler" in self.measures:
            ruler_prompts(
                tokenizer,
                [min(self.ruler_lengths or self.lengths, default=0)],
                tasks=self.ruler_tasks,
                samples=1,
                haystack="\n".join(texts),
                squad=self.squad,
                hotpotqa=self.hotpotqa,
                chat_template=self.chat_template,
                progress=False,
            )
        if "short" in self.measures:
            chosen_benchmarks(self.short_data, self.benchmarks)
        if "lm-eval" in self.measures:
            check_tasks(self.lm_eval, self.lm_eval_data, self.length)
        # the kind with the longest prompts first: the length that its error names is enough for the others
        for kind in sorted(self.kinds, key=lambda k: -shortest_prompt(k, tokenizer, self.chat_template)):
            check_retrieval(kind, tokenizer, texts, self.lengths, self.chat_template)

    def too_short(self, window: int | None) -> dict[str, int]:
        """Measures that rows of `length` tokens are too short for -> the tokens that they need."""
        needed = {"cliff": FIRST_POSITION + 1, "gain": SHORT + 1, "attention": LAST}
        if window is not None:
            needed["entropy"] = window + 2
        return {name: least for name, least in needed.items() if name in self.measures and self.length < least}

    def check_rows(self, window: int | None) -> None:
        """Raise ValueError if the rows are too short for a measure, where `window` positions were trained."""
        for name, least in self.too_short(window).items():
            raise ValueError(
                f"{name} needs rows of at least {least} tokens, and length is {self.length}: give a longer length, or "
                f"leave {name} out."
            )


@dataclass
class _Data:
    """What every model is measured on."""

    tokenizer: PreTrainedTokenizerBase
    texts: list[str]
    plan: EvalPlan

    @cached_property
    def rows(self) -> torch.Tensor:
        return text_rows(self.tokenizer, self.texts, seq_len=self.plan.length, n_rows=self.plan.n_rows)

    @cached_property
    def special(self) -> SpecialTokens:
        """What the tokenizer puts around a text."""
        return SpecialTokens.of(self.tokenizer)


@dataclass
class _Job:
    """One model, what it is measured on, and what is measured already.

    Args:
        model: the model.
        data: what it is measured on.
        memory: of a measure, what keeps its parts.
        is_kept: whether a measure was done in an earlier run.
        window: trained window.
        checkpoint: hub id or folder of the model, for vLLM.
        name: of the measure that runs.
        done: results by measure.
        grids: retrieval of all kinds that are asked.
    """

    model: nn.Module
    data: _Data
    memory: Callable[[str], Remember]
    is_kept: Callable[[str], bool]
    window: int | None
    checkpoint: str | None
    name: str = ""
    done: dict[str, Result] = field(default_factory=dict)
    grids: dict[Kind, RetrievalGrid] = field(default_factory=dict)

    @property
    def remember(self) -> Remember:
        """Keeps parts of the measure that runs."""
        return self.memory(self.name)


def _kind_of(name: str) -> Kind | None:
    """The kind of prompts of a measure; None if it is no retrieval."""
    return next((kind for kind in KINDS if name in (kind, f"niah-{kind}")), None)


def _retrieval(job: _Job) -> RetrievalGrid:
    """The grid of the measure that runs; all others that are missing are measured with it, as they share prompts."""
    plan = job.data.plan
    measures = {kind: name for name in plan.measures if (kind := _kind_of(name)) is not None}
    kind_of_job = next(kind for kind, name in measures.items() if name == job.name)
    if kind_of_job not in job.grids:
        kinds = [kind for kind, name in measures.items() if not job.is_kept(name)]
        by_vllm = plan.backend == "vllm"
        longest = max(plan.lengths, default=0)
        with vllm_answers(job.model, job.checkpoint, longest) if by_vllm else nullcontext() as ask:
            job.grids = retrieval(
                job.model,
                job.data.tokenizer,
                job.data.texts,
                plan.lengths,
                kinds=kinds,
                depths=plan.depths,
                trials=plan.trials,
                batch_size=plan.batch_size,
                seed=plan.seed,
                chat_template=plan.chat_template,
                remember=lambda kind: job.memory(measures[kind]),
                ask=ask,
            )
    return job.grids[kind_of_job]


def _skips(job: _Job) -> list[int]:
    """Up to the longest row: 0 and powers of two."""
    return [0, *(2**k for k in range(6, 30) if 2**k <= job.data.plan.length)]


def _view_kl_rows(job: _Job) -> torch.Tensor:
    window = job.window or job.data.plan.length
    return job.data.rows[:, : min(2048, window // 2, job.data.plan.length)]


# measure -> how to run it, and the class that reads it back
MEASURES: dict[str, tuple[Callable[[_Job], Result], type[Result]]] = {
    "cliff": (lambda j: loss_by_position(j.model, j.data.rows), LossByPosition),
    "gain": (lambda j: context_gain(j.model, j.data.rows, begin=j.data.special.begin), ContextGain),
    **{name: (_retrieval, RetrievalGrid) for name in ("passkey", *(f"niah-{k}" for k in KINDS if k != "passkey"))},
    "position": (
        lambda j: accuracy_by_answer_position([r for k, r in j.done.items() if isinstance(r, RetrievalGrid)]),
        AnswerPositionAccuracy,
    ),
    "ruler": (
        lambda j: ruler(
            j.model,
            j.data.tokenizer,
            j.data.plan.ruler_lengths or j.data.plan.lengths,
            tasks=j.data.plan.ruler_tasks,
            samples=j.data.plan.ruler_samples,
            haystack="\n".join(j.data.texts),
            squad=j.data.plan.squad,
            hotpotqa=j.data.plan.hotpotqa,
            batch_size=j.data.plan.batch_size,
            chat_template=j.data.plan.chat_template,
            remember=j.remember,
        ),
        Ruler,
    ),
    "short": (
        lambda j: short_text(
            j.model,
            j.data.tokenizer,
            data=j.data.plan.short_data,
            benchmarks=j.data.plan.benchmarks,
            limit=j.data.plan.limit,
            batch_size=4 * (j.data.plan.batch_size or 4),
            chat_template=j.data.plan.chat_template,
            remember=j.remember,
        ),
        ShortText,
    ),
    "lm-eval": (
        lambda j: lm_eval_tasks(
            j.model,
            j.data.tokenizer,
            j.data.plan.lm_eval,
            length=j.data.plan.length,
            data=j.data.plan.lm_eval_data,
            limit=j.data.plan.limit,
            batch_size=j.data.plan.batch_size or 4,
            chat_template=j.data.plan.chat_template,
            remember=j.remember,
        ),
        LmEval,
    ),
    "attention": (lambda j: attention_distance(j.model, j.data.rows), AttentionDistance),
    "entropy": (lambda j: entropy_ratio(j.model, j.data.rows, window=j.window), EntropyRatio),
    "view-kl": (lambda j: view_kl(j.model, _view_kl_rows(j), _skips(j)), ViewKL),
}

# what of a plan each measure depends on, beside model, text and version
_DEPENDS = {
    "cliff": ("length", "n_rows"),
    "passkey": ("lengths", "trials", "depths", "seed", "chat_template", "backend"),
    "ruler": ("lengths", "ruler_lengths", "ruler_tasks", "ruler_samples", "squad", "hotpotqa", "chat_template"),
    "short": ("short_data", "benchmarks", "limit", "chat_template"),
    "lm-eval": ("lm_eval", "lm_eval_data", "limit", "length", "chat_template"),
    "position": ("lengths", "trials", "depths", "seed", "chat_template", "backend", "measures"),
    "entropy": ("length", "n_rows", "window"),
    "view-kl": ("length", "n_rows", "window"),
}

# settings that name files: results depend on what is in them, not on where they lie
_FILES = ("squad", "hotpotqa", "short_data", "lm_eval_data")

# measures on rows of text
_READS_ROWS = {"cliff", "gain", "attention", "entropy", "view-kl"}

# settings that only say which parts there are
_SPLIT = ("lengths", "ruler_lengths", "ruler_tasks", "benchmarks", "lm_eval")


def run_suite(
    models: Mapping[str, Callable[[], nn.Module]],
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    plan: EvalPlan,
    cache: str | Path,
    *,
    checkpoints: Mapping[str, str] | None = None,
    tell: Callable[[str], object] = tell,
) -> Results:
    """Measure every model by `plan`, one model in memory at a time, and tell each figure as soon as it is there.

    What is missing, a package, a file or enough text, shows before the first model is loaded. Losses within and beyond
    the window are told of all models over one window, the first one's if the plan names none. A model labelled "native"
    counts as the first.

    Args:
        models: label -> a function that loads the model.
        tokenizer: of all of them.
        texts: held-out documents for rows and haystacks, long ones first.
        plan: what is measured.
        cache: folder of results; what is in it is not measured again.
        checkpoints: label -> hub id or folder of the same model, which vLLM loads; needed where the plan's backend is
            "vllm" and read by nothing else.
        tell: is given each line; by default it is printed above the bars.

    Returns:
        measure -> label -> result.

    Raises:
        ImportError: a package is missing.
        ValueError: too little text, an unknown name, or a model that vLLM would serve wrong.
    """
    checkpoints = checkpoints or {}
    results: Results = {name: {} for name in plan.measures}
    kept = ResultCache(cache)
    settings_of_all = {k: files_hash(v) if k in _FILES and v else v for k, v in asdict(plan).items()}
    # the template itself: "auto" may find another one next time
    chat = uses_chat_template(tokenizer, plan.chat_template)
    settings_of_all["chat_template"] = str(tokenizer.chat_template) if chat else None
    data = _Data(tokenizer, texts, plan)
    plan.check(tokenizer, texts)
    if plan.backend == "vllm":
        for label in models:
            check_vllm(label, checkpoints.get(label))
        settings_of_all["backend"] = f"vllm {vllm_version()}"
    if _READS_ROWS & set(plan.measures):
        _ = data.rows  # too little text shows before a model is loaded
    text = {
        "text": data_hash(*texts),
        "special": [data.special.begin, data.special.end],
        "tokenizer": tokenizer_hash(tokenizer),
    }
    window = plan.window
    for label, load in baseline_first(models).items():
        tell(f"{label}:")
        model = load()
        if plan.reads_attention:
            require_recomputable_attention(model)
        if window is None:
            window = Subject(model).trained_window
            plan.check_rows(window)
        settings_of_all["window"] = window
        description = describe(model)
        subject = {
            "model": model_hash(model),
            "rescaling": description.rescaling,
            "view": description.view,
            "when": description.when,
        }
        keys = {name: {**subject, **text, **_key(name, settings_of_all)} for name in plan.measures}
        announced: set[str] = set()
        job = _Job(
            model,
            data,
            memory=lambda name, keys=keys, announced=announced: _memory(  # type: ignore[misc]
                kept, name, keys[name], announced, tell
            ),
            is_kept=lambda name, keys=keys: kept.has(keys[name]),  # type: ignore[misc]
            window=window,
            checkpoint=checkpoints.get(label),
        )
        del model
        for name in plan.measures:
            measure, kind = MEASURES[name]
            job.name = name
            value = kept.get(keys[name], lambda measure=measure, job=job: measure(job).to_dict())  # type: ignore[misc]
            result = kind.from_dict(value)
            if isinstance(result, LossByPosition):
                result = replace(result, window=window)
            if name not in announced:
                for figure, number in result.headline().items():
                    tell(f"  {figure}: {number:.3f}")
            job.done[name] = results[name][label] = result
        del job
        gc.collect()  # a model with hooks is a cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def _key(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a measure depends on beside the model and the text."""
    fields = _DEPENDS.get(name, _DEPENDS["passkey" if name.startswith("niah") else "cliff"])
    return {"measure": name, "settings": {k: v for k, v in settings.items() if k in fields}}


def _memory(
    kept: ResultCache, name: str, key: Mapping[str, Any], announced: set[str], tell: Callable[[str], object]
) -> Remember:
    """Keeps parts of a measure and tells each figure; what is asked for beside a part does not change it."""
    parts = {**key, "settings": {k: v for k, v in key["settings"].items() if k not in _SPLIT}}

    def remember(part: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        value = kept.get({**parts, "part": part}, make)
        announced.add(name)
        tell(f"  {_part_said(name, part, value)}")
        return value

    return remember


def _part_said(name: str, part: dict[str, Any], value: dict[str, Any]) -> str:
    """A figure of one length, task or benchmark, in words."""
    scores = value.get("scores", [])
    what = " at ".join(str(part[k]) for k in ("task", "benchmark", "length") if k in part)
    if not scores:
        return f"{name}, {what}: nothing that is short enough"
    forced = value.get("forced_scores", [])
    beside = f" as written, {sum(forced) / len(forced):.3f} teacher-forced" if forced else ""
    return (
        f"{name}, {what}: {sum(scores) / len(scores):.3f}{beside}, over {len(scores)} prompt{'s' * (len(scores) > 1)}"
    )
