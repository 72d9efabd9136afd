"""Several measurements of several models in one go, each kept on disk as soon as it is done."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..describe import describe
from ..special_tokens import SpecialTokens
from .asking import ChatTemplate, uses_chat_template
from .attention import AttentionDistance, EntropyRatio, attention_distance, entropy_ratio
from .cache import Remember, ResultCache, afresh, data_hash, files_hash, model_hash
from .comparisons import baseline_first
from .context_gain import ContextGain, context_gain
from .harness import require_lm_eval
from .lm_eval_tasks import LmEval, check_tasks, lm_eval_tasks
from .loss_by_position import LossByPosition, loss_by_position
from .needles import KINDS
from .progress import tell
from .result import Result
from .retrieval import (
    AnswerPositionAccuracy,
    RetrievalGrid,
    accuracy_by_answer_position,
    check_retrieval,
    niah,
    passkey,
)
from .ruler import Ruler, chosen_tasks, ruler
from .short_text import ShortText, chosen_benchmarks, short_text
from .subject import Subject
from .text import text_rows
from .view_kl import ViewKL, view_kl

Results = dict[str, dict[str, Result]]
"""Measure -> label of the model -> result, as `run_suite` returns it and `write_report` takes it."""


@dataclass(frozen=True)
class EvalPlan:
    """What is measured, on how much; equal plans on equal models and text are found in the cache.

    Args:
        measures: names out of `MEASURES`, in this order.
        length: tokens in the longest row.
        n_rows: held-out rows for loss by position.
        lengths: prompt lengths for retrieval.
        ruler_lengths: the same for RULER; None means `lengths`.
        trials: retrieval prompts a cell.
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
            template: "on", "off", or "auto", if there is one.
        window: positions over which all models are compared, within and beyond; None means the trained window of the
            first model.
    """

    measures: tuple[str, ...]
    length: int
    n_rows: int = 4
    lengths: tuple[int, ...] = ()
    ruler_lengths: tuple[int, ...] | None = None
    trials: int = 2
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

    def __post_init__(self) -> None:
        for name in self.measures:
            if name not in MEASURES:
                raise ValueError(f"unknown measure {name!r}. Known: {', '.join(MEASURES)}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}.")

    def check(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
        """Raise what a measure would raise for want of a package, a file, a name or enough text, without a model."""
        uses_chat_template(tokenizer, self.chat_template)
        if {"ruler", "short"} & set(self.measures):
            require_lm_eval()
        if "ruler" in self.measures:
            chosen_tasks(self.ruler_tasks, haystack="given", squad=self.squad, hotpotqa=self.hotpotqa)
        if "short" in self.measures:
            chosen_benchmarks(self.short_data, self.benchmarks)
        if "lm-eval" in self.measures:
            check_tasks(self.lm_eval, self.lm_eval_data, self.length)
        for name in self.measures:
            kind: Any = name.removeprefix("niah-")
            if kind in KINDS:
                check_retrieval(kind, tokenizer, texts, self.lengths, self.chat_template)


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

    @property
    def few_rows(self) -> torch.Tensor:
        """For what takes several forwards a row."""
        return self.rows[:2]


@dataclass
class _Job:
    """One model, what it is measured on, and what is measured already."""

    model: nn.Module
    data: _Data
    remember: Remember
    window: int | None
    done: dict[str, Result] = field(default_factory=dict)


def _skips(job: _Job) -> list[int]:
    """Up to the longest row: 0 and powers of two."""
    return [0, *(2**k for k in range(6, 30) if 2**k <= job.data.plan.length)]


def _view_kl_rows(job: _Job) -> torch.Tensor:
    window = job.window or job.data.plan.length
    return job.data.few_rows[:, : min(2048, window // 2, job.data.plan.length)]


# measure -> how to run it, and the class that reads it back
MEASURES: dict[str, tuple[Callable[[_Job], Result], type[Result]]] = {
    "cliff": (lambda j: loss_by_position(j.model, j.data.rows), LossByPosition),
    "gain": (lambda j: context_gain(j.model, j.data.few_rows, begin=j.data.special.begin), ContextGain),
    "passkey": (
        lambda j: passkey(
            j.model,
            j.data.tokenizer,
            j.data.plan.lengths,
            trials=j.data.plan.trials,
            batch_size=j.data.plan.batch_size,
            seed=j.data.plan.seed,
            chat_template=j.data.plan.chat_template,
            remember=j.remember,
        ),
        RetrievalGrid,
    ),
    **{
        f"niah-{kind}": (
            lambda j, kind=kind: niah(  # type: ignore[misc]
                j.model,
                j.data.tokenizer,
                j.data.texts,
                j.data.plan.lengths,
                kind=kind,
                trials=j.data.plan.trials,
                batch_size=j.data.plan.batch_size,
                seed=j.data.plan.seed,
                chat_template=j.data.plan.chat_template,
                remember=j.remember,
            ),
            RetrievalGrid,
        )
        for kind in ("single", "multikey", "multivalue", "multiquery", "ordinal")
    },
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
    "attention": (lambda j: attention_distance(j.model, j.data.few_rows), AttentionDistance),
    "entropy": (lambda j: entropy_ratio(j.model, j.data.few_rows, window=j.window), EntropyRatio),
    "view-kl": (lambda j: view_kl(j.model, _view_kl_rows(j), _skips(j)), ViewKL),
}

# what of a plan each measure depends on, beside model, text and version
_DEPENDS = {
    "cliff": ("length", "n_rows"),
    "passkey": ("lengths", "trials", "seed", "chat_template"),
    "ruler": ("lengths", "ruler_lengths", "ruler_tasks", "ruler_samples", "squad", "hotpotqa", "chat_template"),
    "short": ("short_data", "benchmarks", "limit", "chat_template"),
    "lm-eval": ("lm_eval", "lm_eval_data", "limit", "length", "chat_template"),
    "position": ("lengths", "trials", "seed", "chat_template", "measures"),
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
) -> Results:
    """Measure every model by `plan`, one model in memory at a time, and print each figure as soon as it is there.

    What is missing, a package, a file or enough text, shows before the first model is loaded. Losses within and beyond
    the window are told of all models over one window, the first one's if the plan names none. A model labelled "native"
    counts as the first.

    Args:
        models: label -> a function that loads the model.
        tokenizer: of all of them.
        texts: held-out documents for rows and haystacks, long ones first.
        plan: what is measured.
        cache: folder of results; what is in it is not measured again.

    Returns:
        measure -> label -> result.
    """
    results: Results = {name: {} for name in plan.measures}
    kept = ResultCache(cache)
    settings_of_all = {k: files_hash(v) if k in _FILES and v else v for k, v in asdict(plan).items()}
    # the template itself: "auto" may find another one next time
    chat = uses_chat_template(tokenizer, plan.chat_template)
    settings_of_all["chat_template"] = str(tokenizer.chat_template) if chat else None
    data = _Data(tokenizer, texts, plan)
    plan.check(tokenizer, texts)
    if _READS_ROWS & set(plan.measures):
        _ = data.rows  # too little text shows before a model is loaded
    text = {"text": data_hash(*texts), "special": [data.special.begin, data.special.end]}
    window = plan.window
    for label, load in baseline_first(models).items():
        print(f"{label}:", flush=True)
        model = load()
        if window is None:
            window = Subject(model).trained_window
        job = _Job(model, data, afresh, window)
        del model
        settings_of_all["window"] = window
        found = describe(job.model)
        subject = {"model": model_hash(job.model), "rescaling": found.rescaling, "view": found.view, "when": found.when}
        for name in plan.measures:
            measure, kind = MEASURES[name]
            fields = _DEPENDS.get(name, _DEPENDS["passkey" if name.startswith("niah") else "cliff"])
            settings = {k: v for k, v in settings_of_all.items() if k in fields}
            key: dict[str, Any] = {**subject, **text, "measure": name, "settings": settings}
            # what is asked for beside a part does not change it
            parts = {**key, "settings": {k: v for k, v in settings.items() if k not in _SPLIT}}
            told: list[str] = []

            def remember(
                part: dict[str, Any],
                make: Callable[[], dict[str, Any]],
                name: str = name,
                parts: dict[str, Any] = parts,
                told: list[str] = told,
            ) -> dict[str, Any]:
                value = kept.get({**parts, "part": part}, make)
                told.append(_part_said(name, part, value))
                tell(f"  {told[-1]}")
                return value

            job.remember = remember
            value = kept.get(key, lambda measure=measure, job=job: measure(job).to_dict())  # type: ignore[misc]
            result = kind.from_dict(value)
            if isinstance(result, LossByPosition):
                result = replace(result, window=window)
            if not told:
                for figure, number in result.headline().items():
                    tell(f"  {figure}: {number:.3f}")
            job.done[name] = results[name][label] = result
        del job
        gc.collect()  # a model with hooks is a cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def _part_said(name: str, part: dict[str, Any], value: dict[str, Any]) -> str:
    """A figure of one length, task or benchmark, in words."""
    scores = value.get("scores", [])
    what = " at ".join(str(part[k]) for k in ("task", "benchmark", "length") if k in part)
    if not scores:
        return f"{name}, {what}: nothing that is short enough"
    return f"{name}, {what}: {sum(scores) / len(scores):.3f} over {len(scores)} prompts"
