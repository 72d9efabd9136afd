"""What a model's config says about RoPE is what the model runs: checked when patching and when saving.

Transformers writes the config of the outermost model and builds frequencies from those of inner ones, once. Nothing
keeps them together when one of the objects is replaced or edited.
"""

from typing import Any

from transformers import PreTrainedModel

from ..rescalings.in_place import RopeParameters
from ..rope.rotary import fresh_state, is_but_rounded, is_recomputed, rotary_by_name
from .state import RopeState


def require_one_config(causal_lm: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ValueError if the config of the whole model and of its decoder are apart: a rescaling would be in one."""
    if not _holds(causal_lm.config, decoder.config):
        raise ValueError(
            f"the config of this {type(causal_lm).__name__} is another object than that of its "
            f"{type(decoder).__name__}, from which frequencies are built: what is written into one would not be saved "
            "with the other. Give both the same one, e.g. model.config = model.model.config, before patch_model."
        )


def require_saved_rope(causal_lm: PreTrainedModel, decoder: PreTrainedModel, state: RopeState) -> None:
    """Raise ValueError if `causal_lm` would be saved with other RoPE parameters than its weights run with."""
    in_force = (state.current if state.beside_native is None else state.beside_native[0]).rope_parameters
    for config in (decoder.config, text_config(causal_lm, decoder)):
        configured = getattr(config, "rope_parameters", in_force)
        if configured != in_force:
            raise ValueError(
                f"the config of this {type(causal_lm).__name__} has RoPE {configured}, and the model runs with "
                f"{in_force}: what is saved would be another model. A config that is replaced or edited after "
                "patch_model does not change the model: put back the one that the decoder had, e.g. "
                "model.config = model.model.config, or call unpatch_model first."
            )


def text_config(causal_lm: PreTrainedModel, decoder: PreTrainedModel) -> Any:
    """The config that is saved for `decoder` with the whole model."""
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
                f"{module.config.rope_parameters}: the config was edited after the model was built, perhaps as that of "
                "another model that shares it, or the frequencies were. Give the model the config that it was built "
                "from, or build it anew with from_pretrained(path, config=config)."
            )


def _holds(config: Any, nested: Any) -> bool:
    """Whether a config is `wanted` or has it inside."""
    return config is nested or any(
        _holds(value, nested) for value in vars(config).values() if hasattr(value, "model_type")
    )
