"""Checks, when patching and when saving, that the model runs with the RoPE of its config.

Transformers saves the config of the outermost model, and builds frequencies from the configs of inner ones, once.
These differ if one of the objects is replaced or edited later.
"""

from typing import Any

from transformers import PreTrainedModel

from ..rescalings.in_place import RopeParameters
from ..rope.rotary import fresh_state, is_but_rounded, is_recomputed, rotary_by_name
from .state import RopeState


def require_one_config(causal_lm: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ValueError if model and decoder have different config objects: a rescaling would be written to one."""
    if not _holds(causal_lm.config, decoder.config):
        raise ValueError(
            f"the config of this {type(causal_lm).__name__} and that of its "
            f"{type(decoder).__name__}, from which frequencies are built, are different objects: a rescaling would not "
            "be saved. Give both the same one, e.g. model.config = model.model.config, before patch_model."
        )


def require_saved_rope(causal_lm: PreTrainedModel, decoder: PreTrainedModel, state: RopeState) -> None:
    """Raise ValueError if `causal_lm` would be saved with other RoPE parameters than its weights run with."""
    in_force = (state.current if state.beside_native is None else state.beside_native[0]).rope_parameters
    for config in (decoder.config, text_config(causal_lm, decoder)):
        configured = getattr(config, "rope_parameters", in_force)
        if configured != in_force:
            raise ValueError(
                f"the config of this {type(causal_lm).__name__} has RoPE {configured}, and the model runs with "
                f"{in_force}: the saved model would be another one. Replacing or editing a config after "
                "patch_model does not change the model: restore the decoder's config, e.g. "
                "model.config = model.model.config, or call unpatch_model first."
            )


def text_config(causal_lm: PreTrainedModel, decoder: PreTrainedModel) -> Any:
    """The config of `decoder` that is saved with the whole model."""
    return (
        decoder.config if _holds(causal_lm.config, decoder.config) else causal_lm.config.get_text_config(decoder=True)
    )


def require_frequencies_of_config(parameters: RopeParameters, decoder: PreTrainedModel) -> None:
    """Raise ValueError if the frequencies in force are not what Transformers builds from the config."""
    for name, module in rotary_by_name(decoder).items():
        live = parameters.rotary[name].buffers
        if any(buffer.is_meta for buffer, _ in live.values()):
            continue
        fresh = fresh_state(module, module.config).buffers
        for buffer_name, (buffer, _) in live.items():
            if buffer_name not in fresh or is_recomputed(module, buffer_name):
                continue
            if is_but_rounded(buffer, fresh[buffer_name][0]):
                continue
            raise ValueError(
                f"frequencies of this {type(decoder).__name__} ({name}.{buffer_name}) are not those of its config, "
                f"{module.config.rope_parameters}: the config or the frequencies were edited after the model was "
                "built, perhaps through another model that shares the config. Restore the config that the model was "
                "built from, or build it anew with from_pretrained(path, config=config)."
            )


def _holds(config: Any, nested: Any) -> bool:
    """Whether a config is `nested` or contains it."""
    return config is nested or any(
        _holds(value, nested) for value in vars(config).values() if hasattr(value, "model_type")
    )
