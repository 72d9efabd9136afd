"""The facts of a card, gathered from a model and from its training record."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from ..adapters.watch import base_revision
from ..forward.config_checks import text_config
from ..forward.state import RopeState, state_of
from ..methods import resolve_rescaling
from ..rope.rotary import find_causal_lm, find_decoder
from ..views.base import TRUE_POSITIONS
from .base_model import BaseModel
from .eval_report import EvalFigures
from .markdown import code, text

Rows = tuple[tuple[str, str], ...]
"""(name, value) of each line of a table."""

LOADERS = {
    "AutoModelForCausalLM": (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "text-generation"),
    "AutoModelForImageTextToText": (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "image-text-to-text"),
    "AutoModelForMultimodalLM": (MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, "any-to-any"),
}
"""Class of Transformers that loads a model -> (the architectures that it knows, name of the task on the hub)."""

_LONGEST_LIST = 8  # numbers: LongRoPE has one for each frequency
# entries of a run that have lines for themselves, or none
_SHOWN_APART = ("format", "rope_patch_version", "objective", "objective_args", "view", "view_args", "trainable", "run")


@dataclass(frozen=True)
class Serving:
    """Which programs serve a checkpoint right.

    Args:
        commands: (program, commands that serve it right, in the folder of the checkpoint).
        wrong: (program, what it does instead) for programs that serve it wrong without an error.
        is_tested: whether the programs were tested with this model type.
    """

    commands: tuple[tuple[str, tuple[str, ...]], ...]
    wrong: tuple[tuple[str, str], ...]
    is_tested: bool


@dataclass(frozen=True)
class CardFacts:
    """The facts of a card.

    Args:
        base: the base model; None if it is not known.
        is_adapter: whether the folder holds an adapter, not a whole model.
        loader: class of Transformers that loads the model.
        base_revision: of the base model of an adapter, from the adapter or its training record; "" if there is none.
        context: table of context window and RoPE.
        always_view: the view that also changes inference, as a Python call; "" if there is none.
        runs: a table for each training run, in order.
        datasets: names of the training sets.
        serving: by other programs; None for a model without RoPE.
        figures: of an evaluation report; None without one.
        citations: BibTeX entries.
        tags: for the hub.
        links: (name, address) of the logs of the run.
        has_tokenizer: whether the folder holds the tokenizer.
        has_chat_template: whether the tokenizer has a chat template.
        has_own_code: whether the model comes with Python code in its repository.
    """

    base: BaseModel | None
    is_adapter: bool
    loader: str
    base_revision: str = ""
    context: Rows = ()
    always_view: str = ""
    runs: tuple[Rows, ...] = ()
    datasets: tuple[str, ...] = ()
    serving: Serving | None = None
    figures: EvalFigures | None = None
    citations: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    links: Rows = ()
    has_tokenizer: bool = True
    has_chat_template: bool = False
    has_own_code: bool = False


def facts_of(
    model: nn.Module,
    runs: Sequence[Mapping[str, Any]],
    *,
    is_adapter: bool,
    rescalings: Sequence[Mapping[str, Any]],
    config: Any = None,
    revision: str | None = None,
) -> CardFacts:
    """The facts of a model in memory.

    Args:
        model: in the state that is saved.
        runs: from `read_runs`.
        is_adapter: whether the folder holds the adapters alone.
        rescalings: "method" and "options" of all rescalings since the base model.
        config: the text config that is saved, if it is not the model's.
        revision: of a model on the hub that has no training record; None is "main", or that of an adapter.
    """
    causal_lm = find_causal_lm(model)
    adapter_revision = base_revision(model)
    base = base_of_runs(runs) or BaseModel.of(causal_lm.config._name_or_path, adapter_revision or revision)
    recorded = adapter_revision or ("" if base is None else base.revision)
    try:
        decoder: Any = find_decoder(model)
    except ValueError:  # a model without RoPE
        decoder = None
    loaders = [name for name, (known, _) in LOADERS.items() if type(causal_lm).__name__ in known.values()]
    return CardFacts(
        base=base,
        is_adapter=is_adapter,
        base_revision=recorded if is_adapter else "",
        loader=loaders[0] if loaders else "AutoModelForCausalLM",  # the latter for repository code
        context=() if decoder is None else _context(model, config or text_config(causal_lm, decoder), runs, rescalings),
        always_view="" if decoder is None else _always_view(state_of(decoder)),
        runs=tuple(_run_rows(run) for run in runs),
        datasets=tuple(dict.fromkeys(name for run in runs if (name := run.get("run", {}).get("dataset")))),
        citations=_citations(runs, rescalings),
        tags=("rope-patch", "long-context"),
        has_own_code=causal_lm.is_remote_code(),
    )


def base_of_runs(runs: Sequence[Mapping[str, Any]]) -> BaseModel | None:
    """The model that the first run started from; None if it is not recorded."""
    named = runs[0].get("run", {}).get("base_model") if runs else None
    return None if named is None else BaseModel.from_dict(named)


def _context(
    model: nn.Module, config: Any, runs: Sequence[Mapping[str, Any]], rescalings: Sequence[Mapping[str, Any]]
) -> Rows:
    window = getattr(config, "max_position_embeddings", None)
    native = native_window(model, runs)
    steps = [f"{code(rescaling['method'])}{_options(rescaling['options'], ' (', ')')}" for rescaling in rescalings]
    return _filled(
        {
            "Window, in positions": "" if window is None else f"{window:,}",
            "Window of the base model": f"{native:,}" if native and native != window else "",
            "Rescaling of RoPE": ", then ".join(steps),
            "`rope_parameters`": code(json.dumps(_short(config.rope_parameters))),
        }
    )


def native_window(model: nn.Module, runs: Sequence[Mapping[str, Any]]) -> int | None:
    """Context window of the base model, in positions; None if it is not known."""
    recorded = runs[0].get("run", {}).get("native_window") if runs else None
    state = state_of(find_decoder(model))
    return recorded or (None if state is None else state.native.max_position_embeddings)


def _always_view(state: RopeState | None) -> str:
    if state is None:
        return ""
    view, when = state.ended or ((state.source.view, state.when) if state.source is not None else (None, "train"))
    return repr(view) if view is not None and when == "always" and view.perturbs else ""


def _run_rows(run: Mapping[str, Any]) -> Rows:
    facts = run.get("run", {})
    view = run.get("view", TRUE_POSITIONS)
    others = {name: value for name, value in run.items() if name not in _SHOWN_APART}
    return _filled(
        {
            "Objective": code(run["objective"]) if "objective" in run else "",
            "Options": _options({**run.get("objective_args", {}), **others}),
            "View of positions in training": "none, true positions"
            if view == TRUE_POSITIONS
            else f"{code(view)}{_options(run.get('view_args', {}), ' (', ')')}",
            "Weights trained": text(facts.get("trained", "")),
            "Dataset": text(facts.get("dataset", "")),
            "Documents": _count(facts.get("documents")),
            "Rows": _count(facts.get("rows")),
            "Tokens in a row, at most": _count(facts.get("row_length")),
            "Tokens seen": _count(facts.get("tokens")),
            "Optimizer steps": _count(facts.get("steps")),
            "Learning rate": text(facts.get("learning_rate", "")),
            "Versions": _options(facts.get("versions", {})),
        }
    )


def _citations(runs: Sequence[Mapping[str, Any]], rescalings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    papers: list[str] = []
    for rescaling in rescalings:
        with suppress(ValueError):  # a method that is not registered here, whose paper its run has recorded
            papers += resolve_rescaling(rescaling["method"], dict(rescaling["options"])).cites
    for run in runs:
        papers += run.get("run", {}).get("papers", [])
    return tuple(dict.fromkeys(papers))


def _filled(rows: Mapping[str, Any]) -> Rows:
    """Rows with a value."""
    return tuple((name, str(value)) for name, value in rows.items() if value not in ("", None))


def _count(value: int | None) -> str:
    return f"{value:,}" if value else ""


def _options(values: Mapping[str, Any], before: str = "", after: str = "") -> str:
    """Options that are set as text for a table cell; options in a dictionary are named `owner.name`."""
    texts = []
    for name, value in _flat(values):
        shown = code(value) if isinstance(value, str) else text(json.dumps(_short(value)))
        texts.append(f"{text(name)} {shown}")
    return f"{before}{', '.join(texts)}{after}" if texts else ""


def _flat(values: Mapping[str, Any], owner: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{owner}{name}.")
        elif value is not None:
            flat.append((f"{owner}{name}", value))
    return flat


def _short(value: Any) -> Any:
    """A value with long lists of numbers replaced by their length."""
    if isinstance(value, Mapping):
        return {name: _short(option) for name, option in value.items()}
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        return f"{len(value)} numbers"
    return list(value) if isinstance(value, tuple) else value
