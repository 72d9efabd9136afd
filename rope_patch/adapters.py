"""Loading an adapter onto a base model with the RoPE that it was trained with."""

import os
import warnings
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .adapter_watch import watch_adapters
from .adapter_weights import digest_of_folder
from .patch import patch_model, unpatch_model
from .rotary import find_causal_lm, find_decoder, with_factors
from .sidecar import CONFIG_MARK, SIDECAR_NAME, always_view_of, read_sidecar, rescalings_of
from .state import state_of

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.get_logger(__name__)


def load_adapter(model: PreTrainedModel, directory: str | os.PathLike[str], **kwargs: Any) -> "PeftModel":
    """Load the adapter in `directory` onto `model` and rescale its RoPE as it was when the adapter was trained.

    A view with when="always", which changes inference, is put on again; one of training forwards is not. A later
    `patch_model` with a rescaling starts from there, as it does on the merged checkpoint: ABF's base stays
    under YaRN on top. `native_rope` still means the base model's RoPE parameters, and `unpatch_model` goes back to
    them.

    Args:
        model: the base model, not patched.
        directory: where a patched PEFT model was saved: an adapter with `rope_patch.json` beside it. A `~` in front is
            the user's home.
        **kwargs: passed to `peft.PeftModel.from_pretrained`, e.g. is_trainable=True, or subfolder="b" for an adapter
            that was saved under a name of its own, "b".

    Raises:
        ImportError: PEFT is not installed.
        FileNotFoundError: there is no such directory, or no specification lies beside the adapter.
        ValueError: the model is patched already, or came with other RoPE parameters than the adapter's base model; or
            the specification is damaged, is that of other weights, or names a rescaling that makes other RoPE
            parameters today than when the adapter was trained.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("load_adapter needs PEFT: pip install 'rope-patch[peft]'.") from error
    directory = os.path.expanduser(directory)
    subfolder = kwargs.get("subfolder")
    beside = os.path.join(directory, subfolder) if subfolder else directory
    specification = read_sidecar(beside)
    decoder = find_decoder(model)
    if state_of(decoder) is not None:
        raise ValueError("load_adapter needs a model without patches: call unpatch_model first.")
    loaded = (decoder.config.rope_parameters, getattr(decoder.config, "max_position_embeddings", None))
    recorded = (specification["native_rope_parameters"], specification["native_max_position_embeddings"])
    if loaded != recorded:
        raise ValueError(
            f"the adapter in {beside} was trained on a base model with RoPE {recorded[0]} and a window of "
            f"{recorded[1]} positions, this model has {loaded[0]} and {loaded[1]}. Load the base model that it was "
            "trained on."
        )
    _require_own_weights(beside, specification)
    view = always_view_of(specification)
    try:
        for rescaling in rescalings_of(specification):
            patch_model(model, rescaling)
            state_of(decoder).settle()  # type: ignore[union-attr]
        _require_recorded_rope(decoder, specification, beside)
        if view is not None:
            patch_model(model, view[0], seed=view[1], when="always")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*'{CONFIG_MARK}'")  # what it asks for is being done
            adapted = PeftModel.from_pretrained(model, directory, **kwargs)
    except Exception:
        unpatch_model(model)
        raise
    state = state_of(decoder)
    if state is not None:
        watch_adapters(adapted, find_causal_lm(model))
    return adapted


def _require_own_weights(directory: str | os.PathLike[str], specification: dict[str, Any]) -> None:
    """Raise ValueError if the adapter was saved anew, by a model without patches, which leaves the specification."""
    recorded, digest = specification.get("adapter_weights"), digest_of_folder(directory)
    if digest is None:
        return  # PEFT says what is missing
    if recorded is None:
        logger.warning(
            f"{SIDECAR_NAME} in {directory} does not record which weights it belongs to, as of rope-patch "
            f"{specification['rope_patch_version']}: an adapter that was saved over it later would be loaded with a "
            "RoPE that is not its own."
        )
    elif recorded != digest:
        raise ValueError(
            f"{SIDECAR_NAME} in {directory} does not belong to the weights beside it, which were saved later, or "
            "changed. If they were trained without rope_patch, delete the file and use PeftModel.from_pretrained; if "
            'they were trained with the RoPE that it names, set its "adapter_weights" to null.'
        )


def _require_recorded_rope(decoder: Any, specification: dict[str, Any], directory: str) -> None:
    """Raise ValueError if the rescalings make another model now than that which the adapter was trained on.

    They did in versions before 'abf' with a window kept the attention factor of a LongRoPE that names no factor.
    """
    recorded: tuple[Any, Any] = (specification["rope_parameters"], specification["max_position_embeddings"])
    made: tuple[Any, Any] = (decoder.config.rope_parameters, getattr(decoder.config, "max_position_embeddings", None))
    if with_factors(*recorded) != with_factors(*made):
        raise ValueError(
            f"the adapter in {directory} was trained with RoPE {recorded[0]} and a window of {recorded[1]} positions, "
            f"by rope-patch {specification['rope_patch_version']}. Its rescaling now makes {made[0]} and {made[1]}, "
            "which is another model. Load it with the version that trained it, and save what merge_and_unload() "
            "returns."
        )
