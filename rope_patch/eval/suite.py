"""Run several measures on several models; each result is stored on disk as soon as it is there."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..base.registry import Registry, unknown
from ..describe import describe
from ..layout.special_tokens import SpecialTokens
from ..prompts.asking import ChatTemplate, uses_chat_template
from ..prompts.text import text_rows
from .measures.answer_positions import POSITION
from .measures.attention import ATTENTION, ENTROPY
from .measures.base import Job, Measure
from .measures.comparisons import baseline_first
from .measures.context_gain import GAIN, Kind
from .measures.lm_eval_tasks import LM_EVAL
from .measures.loss_by_position import CLIFF
from .measures.prompt_grid import DEPTHS
from .measures.retrieval import RETRIEVAL
from .measures.retrieval_grid import GIVEN
from .measures.ruler import RULER
from .measures.short_text import SHORT
from .measures.subject import Subject
from .measures.view_kl import VIEW_KL
from .measures.vllm_backend import check_vllm, vllm_version
from .results.cache import Remember, ResultCache, afresh, data_hash, files_hash, model_hash
from .results.progress import tell
from .results.result import Result
from .results.tokenizer_identity import tokenizer_hash

MEASURES = Registry("measure")
"""Name -> measure, in the order in which they run."""
for _measure in (CLIFF, GAIN, *RETRIEVAL, POSITION, RULER, SHORT, LM_EVAL, ATTENTION, ENTROPY, VIEW_KL):
    MEASURES.add(_measure.name, _measure)

Backend = Literal["transformers", "vllm"]

Results = dict[str, dict[str, Result]]
"""Measure -> label of the model -> result, as `run_suite` returns it and `write_report` takes it."""


@dataclass(frozen=True)
class EvalPlan:
    """What is measured. The same plan with the same models and texts finds its results in the cache.

    Most fields are also flags of `rope-patch eval`, whose help shows the descriptions below.

    Args:
        measures: names from `MEASURES`, in this order.
        length: tokens in the longest row.
        n_rows: held-out rows for loss by position, context gain, attention and view KL.
        gain: definition of the context gain, "exact" or "paper", as in `context_gain`.
        lengths: prompt lengths for retrieval and RULER, in tokens. The default of `rope-patch eval` begins at a
            sixteenth of the window and doubles up to `length`, without lengths that are too short for the needles.
        ruler_lengths: prompt lengths for RULER, in tokens; default: `lengths`.
        trials: retrieval prompts for each length and depth, in four wordings in turn; default: 2. There are ten depths,
            so 20 gives 200 prompts for each length.
        depths: depths of the needle; 0 is the start of the text and 1 its end.
        ruler_tasks: RULER tasks; default: all whose data are given.
        ruler_samples: prompts for each RULER task and length; default: 20.
        squad: SQuAD's JSON file for RULER's first QA task.
        hotpotqa: HotpotQA's JSON file for RULER's second QA task.
        short_data: folder of short-text benchmarks as .jsonl(.xz); default: the hub.
        benchmarks: short-text benchmarks, or linearard for the eight of that paper; default: all whose data are there.
        limit: maximum number of samples of each short-text benchmark and of each of lm-eval's tasks; default: all.
        lm_eval: lm-eval's tasks, by its names.
        lm_eval_data: folder with the data of lm-eval's tasks as TASK.jsonl(.xz); default: the hub.
        lm_eval_include: folder with the YAML files of lm-eval's tasks of your own.
        confirm_run_unsafe_code: let lm-eval's tasks that do so, such as humaneval, mbpp and longproc, run the model's
            code.
        batch_size: maximum number of prompts answered at once; four times as many short requests share a forward pass.
            Default: prompts with 8 GiB of keys and values, 4 prompts of lm-eval's tasks, and 16 short requests.
        seed: seed of the prompts of passkeys, needles and RULER; default: 0. Another seed gives other prompts.
        chat_template: whether retrieval, RULER, short text and lm-eval's tasks use the tokenizer's chat template;
            default: auto, if there is one, except for LAMBADA. Loss by position always reads raw text.
        window: window over which all models are compared, in positions; default: the trained window of the first model.
        backend: what answers retrieval prompts; default: transformers. vllm has to be installed, and takes checkpoints
            without adapters or rescaling after loading. Its first answers are compared with Transformers', which
            measures everything else.
        options: values of options that measures of other packages declare, by name; default: theirs.
    """

    measures: tuple[str, ...]
    length: int
    n_rows: int = 4
    gain: Kind = "exact"
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
    lm_eval_include: str | None = None
    confirm_run_unsafe_code: bool = False
    batch_size: int | None = None
    seed: int = 0
    chat_template: ChatTemplate = "auto"
    window: int | None = None
    backend: Backend = "transformers"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {name: of.get("default") for measure in self.chosen for name, of in measure.options.items()}
        for name in self.options:
            if name not in own:
                raise unknown("option", name, own, of=f"measures {', '.join(self.measures)}")
        object.__setattr__(self, "options", {**own, **self.options})
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {self.backend!r}.")

    @property
    def chosen(self) -> list[Measure]:
        """The measures that `measures` names."""
        return [MEASURES[name] for name in self.measures]

    @property
    def asks(self) -> bool:
        """Whether any measure asks questions, for which `chat_template` counts."""
        return any(measure.asks for measure in self.chosen)

    def check(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
        """Raise, without a model, if a measure lacks a package, a file, a name or enough text."""
        self.check_rows(self.window)
        uses_chat_template(tokenizer, self.chat_template)
        for check in dict.fromkeys(measure.check for measure in self.chosen):
            check(self, tokenizer, texts)

    @property
    def model_checks(self) -> list[Callable[[nn.Module], None]]:
        """Checks that raise for a model, with or without its weights, that one of the measures cannot measure."""
        return list(dict.fromkeys(m.check_model for m in self.chosen if m.check_model is not None))

    def too_short(self, window: int | None) -> dict[str, int]:
        """Measures for which rows of `length` tokens are too short -> the tokens that they need."""
        least = {measure.name: measure.least(window) for measure in self.chosen}
        return {name: tokens for name, tokens in least.items() if self.length < tokens}

    def check_rows(self, window: int | None) -> None:
        """Raise ValueError if the rows are too short for a measure of a model with this trained window."""
        for name, least in self.too_short(window).items():
            raise ValueError(
                f"{name} needs rows of at least {least} tokens, and length is {self.length}: use a longer length, or "
                f"leave {name} out."
            )


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
    """Measure every model by `plan`, with one model in memory at a time, and print each figure as soon as it is there.

    Missing packages, files or text raise before the first model is loaded. All models are compared over one window,
    which is the baseline's if the plan has none. The baseline is the model labelled "native", or else the first.

    Args:
        models: label -> function that loads the model.
        tokenizer: tokenizer of all models.
        texts: held-out documents for rows and haystacks, long ones first.
        plan: what is measured.
        cache: folder of stored results, which are not measured again.
        checkpoints: label -> hub id or folder of the same model, for vLLM; only backend "vllm" needs it.
        tell: called with each line; by default it prints above the progress bars.

    Returns:
        measure -> label -> result.

    Raises:
        ImportError: a package is missing.
        ValueError: too little text, an unknown name, or a model that vLLM would serve wrong.
    """
    checkpoints = checkpoints or {}
    results: Results = {name: {} for name in plan.measures}
    stored = ResultCache(cache)
    special = SpecialTokens.of(tokenizer)
    # the key holds the template itself, because "auto" may find another one next time
    chat = str(tokenizer.chat_template) if uses_chat_template(tokenizer, plan.chat_template) else None
    by_vllm = plan.backend == "vllm"
    settings = {
        **asdict(plan),
        **plan.options,
        "chat_template": chat,
        "backend": f"vllm {vllm_version()}" if by_vllm else plan.backend,
    }
    # results depend on the contents of files, not on their paths
    settings |= {k: files_hash(settings[k]) for m in plan.chosen for k in m.files if settings[k]}
    plan.check(tokenizer, texts)
    if by_vllm:
        for label in models:
            check_vllm(label, checkpoints.get(label))
    rows = torch.empty(0, 0, dtype=torch.int64)
    if any(measure.reads_rows for measure in plan.chosen):
        rows = text_rows(tokenizer, texts, seq_len=plan.length, n_rows=plan.n_rows)
    text = {
        "text": data_hash(*texts),
        "special": [special.begin, special.end],
        "tokenizer": tokenizer_hash(tokenizer),
    }

    def without_model(name: str) -> Remember:
        """Stores what a measure makes of the tokenizer, the texts and its settings."""
        key = {**text, "measure": name, "settings": _settings(MEASURES[name], settings, whole=False)}
        return lambda part, make: stored.get({**key, "part": part}, make)

    window = plan.window
    for label, load in baseline_first(models).items():
        tell(f"{label}:")
        model = load()
        for check in plan.model_checks:
            check(model)
        if window is None:
            window = Subject(model).trained_window
            plan.check_rows(window)
        settings["window"] = window
        description = describe(model)
        subject = {
            "model": model_hash(model),
            "rescaling": description.rescaling,
            "view": description.view,
            "when": description.when,
        }
        keys = {m.name: {**subject, **text, "measure": m.name, "settings": _settings(m, settings)} for m in plan.chosen}
        printed: set[str] = set()  # measures whose parts have been printed

        def memory(name: str, keys: dict[str, dict[str, Any]] = keys, printed: set[str] = printed) -> Remember:
            """Stores and prints parts of a measure; settings that only choose the parts are not in their keys."""
            key = {**keys[name], "settings": _settings(MEASURES[name], keys[name]["settings"], whole=False)}

            def remember(part: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
                value = stored.get({**key, "part": part}, make)
                printed.add(name)
                tell(f"  {_part_line(name, part, value)}")
                return value

            return remember

        job = Job(
            model,
            tokenizer,
            texts,
            plan,
            rows,
            special.begin,
            window,
            checkpoints.get(label),
            memory=memory,
            is_kept=lambda name, keys=keys: stored.has(keys[name]),  # type: ignore[misc]
            without_model=without_model,
        )
        del model  # the job alone holds it
        for measure in plan.chosen:
            job.name = name = measure.name
            keep = stored.get if measure.whole else afresh  # its parts are stored by `memory`
            value = keep(keys[name], lambda measure=measure, job=job: measure.run(job).to_dict())  # type: ignore[misc]
            result = measure.result.from_dict(value).over_window(window)
            if name not in printed:
                for figure, number in result.headline().items():
                    tell(f"  {figure}: {number:.3f}")
            job.done[name] = results[name][label] = result
        del job
        gc.collect()  # a model with hooks is a reference cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def _settings(measure: Measure, settings: Mapping[str, Any], *, whole: bool = True) -> dict[str, Any]:
    """The settings that a measure depends on, or one of its parts if not `whole`."""
    row_settings = ("length", "n_rows") if measure.reads_rows else ()
    names = (*row_settings, *measure.settings, *measure.files, *(measure.parts if whole else ()))
    return {name: settings[name] for name in names}


def _part_line(name: str, part: dict[str, Any], value: dict[str, Any]) -> str:
    """The line that is printed for one length, task or benchmark."""
    scores = value.get("scores", [])
    what = " at ".join(str(part[k]) for k in ("task", "benchmark", "length") if k in part)
    if not scores:
        return f"{name}, {what}: no document is short enough"
    forced = value.get("forced_scores", [])
    both = f" as written, {sum(forced) / len(forced):.3f} {GIVEN}" if forced else ""
    return f"{name}, {what}: {sum(scores) / len(scores):.3f}{both}, over {len(scores)} prompt{'s' * (len(scores) > 1)}"
