"""Loading an adapter onto a base model with the RoPE that it was trained with."""

import os
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from .patch import patch_model, unpatch_model
from .rotary import find_core, find_decoder
from .sidecar import read_sidecar, rescalings_of, watch_adapters
from .state import state_of

if TYPE_CHECKING:
    from peft import PeftModel


def load_adapter(model: PreTrainedModel, directory: str | os.PathLike[str], **kwargs: Any) -> "PeftModel":
    """Load the adapter in `directory` onto `model` and rescale its RoPE as it was when the adapter was trained.

    A later `patch_model` with a rescaling starts from there, as it does on the merged checkpoint: ABF's base stays
    under YaRN on top. `native_rope` still means the base model's schedule, and `unpatch_model` goes back to it.

    Args:
        model: the base model, not patched.
        directory: where a patched PEFT model was saved: an adapter with `rope_patch.json` beside it.
        **kwargs: passed to `peft.PeftModel.from_pretrained`, e.g. is_trainable=True.

    Raises:
        ImportError: PEFT is not installed.
        FileNotFoundError: there is no such directory, or no specification lies beside the adapter.
        ValueError: the model is patched already, or came with another schedule than the adapter's base model.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("load_adapter needs PEFT: pip install 'rope-patch[peft]'.") from error
    specification = read_sidecar(directory)
    decoder = find_decoder(model)
    if state_of(decoder) is not None:
        raise ValueError("load_adapter needs a model without patches: call unpatch_model first.")
    found = (decoder.config.rope_parameters, getattr(decoder.config, "max_position_embeddings", None))
    wanted = (specification["native_rope_parameters"], specification["native_max_position_embeddings"])
    if found != wanted:
        raise ValueError(
            f"the adapter in {directory} was trained on a base model with RoPE {wanted[0]} and a window of {wanted[1]} "
            f"positions, this model has {found[0]} and {found[1]}. Load the base model that it was trained on."
        )
    try:
        for rescaling in rescalings_of(specification):
            patch_model(model, rescaling["method"], **rescaling["options"])
            state_of(decoder).settle()  # type: ignore[union-attr]
        adapted = PeftModel.from_pretrained(model, directory, **kwargs)
    except Exception:
        unpatch_model(model)
        raise
    state = state_of(decoder)
    if state is not None:  # a forward would find the adapter, and it may be saved before the first
        watch_adapters(adapted, find_core(model), state)
    return adapted
