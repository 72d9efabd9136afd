"""Several measurements of several models in one go, each kept on disk as soon as it is done."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..describe import describe
from .attention import AttentionDistance, EntropyRatio, attention_distance, entropy_ratio
from .cache import Remember, ResultCache, afresh, data_hash, files_hash, model_hash
from .context_gain import ContextGain, context_gain
from .loss_by_position import LossByPosition, loss_by_position
from .result import Result
from .retrieval import AnswerPositionAccuracy, RetrievalGrid, accuracy_by_answer_position, niah, passkey
from .ruler import Ruler, ruler
from .short_text import ShortText, short_text
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
        lengths: prompt lengths for retrieval and RULER.
        trials: retrieval prompts a cell.
        ruler_tasks: None means all whose data are given.
        ruler_samples: prompts of each RULER task and length.
        squad: file for RULER's first QA task.
        hotpotqa: file for RULER's second QA task.
        short_data: folder of short-text benchmarks; None means the hub's.
        benchmarks: short-text benchmarks; None means all that there are.
        limit: samples of each short-text benchmark.
        batch_size: prompts or short requests in a forward.
        seed: of retrieval prompts.
    """

    measures: tuple[str, ...]
    length: int
    n_rows: int = 4
    lengths: tuple[int, ...] = ()
    trials: int = 2
    ruler_tasks: tuple[str, ...] | None = None
    ruler_samples: int = 20
    squad: str | None = None
    hotpotqa: str | None = None
    short_data: str | None = None
    benchmarks: tuple[str, ...] | None = None
    limit: int | None = None
    batch_size: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.measures:
            if name not in MEASURES:
                raise ValueError(f"unknown measure {name!r}. Known: {', '.join(MEASURES)}.")


@dataclass
class _Data:
    """What every model is measured on."""

    tokenizer: PreTrainedTokenizerBase
    texts: list[str]
    plan: EvalPlan

    @cached_property
    def rows(self) -> torch.Tensor:
        return text_rows(self.tokenizer, self.texts, seq_len=self.plan.length, n_rows=self.plan.n_rows)

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
    done: dict[str, Result] = field(default_factory=dict)


def _skips(job: _Job) -> list[int]:
    """Up to the longest row, as the trained window leaves room for: 0 and powers of two."""
    return [0, *(2**k for k in range(6, 30) if 2**k <= job.data.plan.length)]


def _view_kl_rows(job: _Job) -> torch.Tensor:
    window = Subject(job.model).trained_window or job.data.plan.length
    return job.data.few_rows[:, : min(2048, window // 2, job.data.plan.length)]


# measure -> how to run it, and the class that reads it back
MEASURES: dict[str, tuple[Callable[[_Job], Result], type[Result]]] = {
    "cliff": (lambda j: loss_by_position(j.model, j.data.rows), LossByPosition),
    "gain": (lambda j: context_gain(j.model, j.data.few_rows), ContextGain),
    "passkey": (
        lambda j: passkey(
            j.model,
            j.data.tokenizer,
            j.data.plan.lengths,
            trials=j.data.plan.trials,
            batch_size=j.data.plan.batch_size,
            seed=j.data.plan.seed,
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
            j.data.plan.lengths,
            tasks=j.data.plan.ruler_tasks,
            samples=j.data.plan.ruler_samples,
            haystack="\n".join(j.data.texts),
            squad=j.data.plan.squad,
            hotpotqa=j.data.plan.hotpotqa,
            batch_size=j.data.plan.batch_size,
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
            batch_size=4 * j.data.plan.batch_size,
            remember=j.remember,
        ),
        ShortText,
    ),
    "attention": (lambda j: attention_distance(j.model, j.data.few_rows), AttentionDistance),
    "entropy": (lambda j: entropy_ratio(j.model, j.data.few_rows), EntropyRatio),
    "view-kl": (lambda j: view_kl(j.model, _view_kl_rows(j), _skips(j)), ViewKL),
}

# what of a plan each measure depends on, beside model, text and version
_DEPENDS = {
    "passkey": ("lengths", "trials", "seed"),
    "ruler": ("lengths", "ruler_tasks", "ruler_samples", "squad", "hotpotqa"),
    "short": ("short_data", "benchmarks", "limit"),
    "position": ("lengths", "trials", "seed", "measures"),
}

# settings that name files: results depend on what is in them, not on where they lie
_FILES = ("squad", "hotpotqa", "short_data")

# settings that only say which parts there are
_SPLIT = ("lengths", "ruler_tasks", "benchmarks")


def run_suite(
    models: Mapping[str, Callable[[], nn.Module]],
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    plan: EvalPlan,
    cache: str | Path,
) -> Results:
    """Measure every model by `plan`, one model in memory at a time.

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
    text_hash = data_hash(*texts)
    data = _Data(tokenizer, texts, plan)
    for label, load in models.items():
        print(f"{label}:", flush=True)
        job = _Job(load(), data, afresh)
        found = describe(job.model)
        subject = {"model": model_hash(job.model), "rescaling": found.rescaling, "view": found.view, "when": found.when}
        for name in plan.measures:
            measure, kind = MEASURES[name]
            fields = _DEPENDS.get(name, _DEPENDS["passkey"] if name.startswith("niah") else ("length", "n_rows"))
            settings = {k: v for k, v in settings_of_all.items() if k in fields}
            key: dict[str, Any] = {**subject, "text": text_hash, "measure": name, "settings": settings}
            # what is asked for beside a part does not change it
            parts = {**key, "settings": {k: v for k, v in settings.items() if k not in _SPLIT}}
            job.remember = lambda part, make, parts=parts: kept.get({**parts, "part": part}, make)  # type: ignore[misc]
            value = kept.get(key, lambda measure=measure, job=job: measure(job).to_dict())  # type: ignore[misc]
            job.done[name] = results[name][label] = kind.from_dict(value)
        del job
        gc.collect()  # a model with hooks is a cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results
