"""The model card of an exported checkpoint, from the model and the training record beside its source."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..forward.state import state_of
from ..model_card import EvalFigures, facts_of, has_card_of_user, read_runs, render, write_card, write_runs
from ..rope.rotary import find_causal_lm, find_decoder
from .serving import serving_of


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
    """Write README.md and the training record into `folder`.

    Args:
        folder: with the checkpoint.
        title: of the card.
        model: that was exported.
        config: the text config that was saved.
        source: folder of the checkpoint or adapter, with its training record; None if the model was in memory.
        revision: of the model on the hub, if the user named one.
        target: the program that the checkpoint is for.
        figures: of an evaluation report.
        has_tokenizer: whether the folder holds the tokenizer.
        folded: whether an attention factor was folded into the weights.
    """
    runs = read_runs(source if source is not None else find_causal_lm(model).config._name_or_path)
    # an adapter is loaded with all its rescalings in force; those of a checkpoint are in its config, and recorded
    is_adapter = source is not None and (source / "adapter_config.json").is_file()
    rescalings = list(runs[-1].get("run", {}).get("rescalings", [])) if runs and not is_adapter else []
    state = state_of(find_decoder(model))
    in_force = () if state is None else state.rescalings
    rescalings += [{"method": rescaling.name, "options": rescaling.options()} for rescaling in in_force]
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
