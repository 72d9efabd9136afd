"""The card of an exported checkpoint: what is known of the model, and what the record beside its source says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..forward.state import state_of
from ..model_card import (
    EvalFigures,
    facts_of,
    has_card_of_user,
    read_runs,
    render,
    write_card,
    write_runs,
)
from ..rope.rotary import find_causal_lm, find_decoder
from .serving import serving_of


def figures_of(report: str | Path | None, source: Path | None) -> EvalFigures | None:
    """The figures of the report that the user names, or of one that lies with the checkpoint.

    Raises:
        FileNotFoundError: there is no such report.
        ValueError: it is none.
    """
    if report is not None:
        return EvalFigures.read(report, source)
    return None if source is None else EvalFigures.beside(source)


def write_export_card(
    folder: Path,
    title: str,
    model: nn.Module,
    config: Any,
    *,
    source: Path | None,
    revision: str | None,
    target: str,
    figures: EvalFigures | None,
    has_tokenizer: bool,
    folded: bool,
) -> None:
    """Write README.md and the record of training into `folder`.

    Args:
        folder: with the checkpoint.
        title: of the page.
        model: that was exported.
        config: the text config that was saved.
        source: folder of the checkpoint or adapter, None for a model in memory, whose record lies where it came from.
        revision: of the model on the hub, where the user names one.
        target: the program that it is for.
        figures: of a report.
        has_tokenizer: whether the folder holds the tokenizer.
        folded: whether an attention factor is in the weights.
    """
    causal_lm = find_causal_lm(model)
    runs = read_runs(source if source is not None else causal_lm.config._name_or_path)
    rescalings = _rescalings(model, source, runs)
    facts = facts_of(model, runs, is_adapter=False, rescalings=rescalings, config=config, revision=revision)
    note = (("Attention factor", f"in the weights of the queries, for {target}"),) if folded else ()
    facts = replace(
        facts,
        context=(*facts.context, *note),
        serving=serving_of(config, getattr(config, "max_position_embeddings", None), target),
        figures=figures,
        has_tokenizer=has_tokenizer,
        has_chat_template=(folder / "chat_template.jinja").is_file(),
    )
    write_card(folder, render(facts, title), keep=has_card_of_user(folder))
    write_runs(runs, folder)


def _rescalings(model: nn.Module, source: Path | None, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that were applied since the base model: an adapter's come back with it, a checkpoint's are in its config."""
    state = state_of(find_decoder(model))
    applied = () if state is None else state.rescalings
    now = [{"method": rescaling.name, "options": rescaling.options()} for rescaling in applied]
    is_adapter = source is not None and (source / "adapter_config.json").is_file()
    before = runs[-1].get("run", {}).get("rescalings", []) if runs and not is_adapter else []
    return [*before, *now]
