"""Check before training that its positions lie within the context window of the model."""

import math
from typing import Any

from transformers.utils import logging

from rope_patch.forward.state import state_of
from rope_patch.rescalings import Rescaling, advised_rescaling
from rope_patch.rescalings.in_place import names_no_window
from rope_patch.rope.rotary import find_decoder, is_dynamic
from rope_patch.views import View

logger = logging.get_logger(__name__)


def check_window(model: Any, view: View, longest: int | None, *, tell: bool = True) -> None:
    """Compare the window of a model with the positions that it will be trained on.

    Args:
        model: patched; its window is `config.max_position_embeddings`.
        view: of the training.
        longest: tokens of the longest document of a row; None if it is not known.
        tell: whether this process logs warnings.

    Raises:
        ValueError: a view's `target`, or a document under a rescaling, lies beyond the window.
    """
    decoder = find_decoder(model)
    window = getattr(decoder.config, "max_position_embeddings", None)
    state = state_of(decoder)
    rescaling = None if state is None else state.rescaling
    if window is None or (rescaling is not None and names_no_window(rescaling, window)):
        return
    rope: Any = getattr(decoder.config, "rope_parameters", None) or {}
    # some families have a set of parameters for each layer type
    parameter_sets = [rope, *(entry for entry in rope.values() if isinstance(entry, dict))]
    if any(is_dynamic(entry.get("rope_type", "")) for entry in parameter_sets):
        return  # frequencies follow the row, so that no window can be passed
    for name, target in view.targets():
        if target > window:
            raise ValueError(
                f"view_args: target of view {name!r} must not exceed the model's window of {window} positions, got "
                f"target={target}. {_remedy(rescaling, window, target)}, or lower target."
            )
    if longest is None:
        return
    if longest > window:  # tokens at their own positions
        if rescaling is not None:
            raise ValueError(
                f"max_length must not let documents exceed the model's window of {window} positions under {rescaling}, "
                f"and the longest document of a row has {longest} tokens. {_remedy(rescaling, window, longest)}, or "
                "lower max_length."
            )
        if tell:
            logger.warning(
                f"documents of rows have up to {longest} tokens, beyond the model's window of {window}, and no "
                f"rescaling is in force. {_remedy(None, window, longest)}, or lower max_length, unless this is "
                "intended."
            )
    reach = view.reach(longest)  # the largest RoPE index of a draw; None if that is not known
    if tell and view.perturbs and reach is not None and reach >= max(window, longest):
        logger.warning(
            f"view {view.name!r} shows RoPE indices up to {reach}, beyond the model's window of {window} positions. "
            "If this is intended, ignore this warning."
        )


def _remedy(rescaling: Rescaling | None, window: int, required: int) -> str:
    if rescaling is not None:
        return rescaling.remedy(window, required)
    factor = math.ceil(required / window)
    return f"Rescale the model by a factor of at least {factor}, e.g. {advised_rescaling(float(factor))}"
