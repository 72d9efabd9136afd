"""Checks before the first step: documents too long for window, view or objective, or too short for the view."""

from functools import partial
from typing import Any

from rope_patch.forward.sources import ViewSource
from rope_patch.forward.state import state_of
from rope_patch.layout.document_lengths import document_lengths, longest_document
from rope_patch.methods import resolve_view
from rope_patch.rope.rotary import find_decoder
from rope_patch.views.base import TRUE_POSITIONS

from ..config import RopeSFTConfig
from ..objectives import Objective, objective_of
from .dataset_checks import named_sets
from .training_set import document_tokens
from .view_effect import require_effect_on
from .window_check import check_window


def check_lengths(
    model: Any, args: RopeSFTConfig, source: ViewSource, objective: Objective | None, train_dataset: Any
) -> None:
    """Raise before training if the run cannot take a document of its training set.

    Args:
        model: patched.
        args: of the trainer.
        source: of its view.
        objective: of the trainer, None for TRL's loss.
        train_dataset: as TRL has prepared it.

    Raises:
        ValueError: a document is too long, or the view or shifted attention changes none of them.
    """
    draws = source.view.perturbs and (objective is None or objective.draws)
    view = source.view if draws else resolve_view(TRUE_POSITIONS)  # positions that training sees
    view.check_run(args)  # also a view that the user put on the model before
    lengths = document_lengths(train_dataset)
    lengths = None if lengths is None else view.kept(lengths)
    longest = None if lengths is None else int(lengths.max())
    check_window(model, view, longest, tell=args.process_index == 0)
    source.checked_length = 0  # the documents of an earlier trainer may have been longer
    if lengths is None or not longest:
        return
    view.check_length(longest)
    if draws:
        source.checked_length = longest
    if objective is not None:
        objective.check_length(longest)
        objective.check_documents(lengths)
    if draws:
        kind = objective_of(args)
        require_effect_on(
            view,
            lengths,
            find_decoder(model).config.num_hidden_layers,
            reads_last=args.objective_options.counts_every_token,
            controls=kind.takes_view_controls,
            documents=partial(document_tokens, train_dataset),
        )


def check_evaluation_lengths(model: Any, source: ViewSource, objective: Objective | None, eval_dataset: Any) -> None:
    """Raise before training if evaluations cannot take a document of their sets.

    Args:
        model: patched.
        source: of its view, with the longest training document of `check_lengths`.
        objective: of the trainer, None for TRL's loss.
        eval_dataset: as TRL has prepared it: one set, several by name, or None. Streams are not looked at.

    Raises:
        ValueError: a document is too long; the message names the set.
    """
    state = state_of(find_decoder(model))
    always = state is not None and state.when == "always"
    for name, dataset in named_sets(eval_dataset, "eval_dataset"):
        longest = longest_document(dataset)
        if longest is None:
            continue
        length = max(longest, source.checked_length)  # a drawn split may lie beyond all of a short set
        try:
            if always:
                source.view.check_length(length)
            if objective is not None:
                objective.check_evaluation(length, source.view)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
