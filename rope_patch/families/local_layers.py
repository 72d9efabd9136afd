"""Layers with sliding-window or chunked attention, which rescalings and views do not change.

In a text of any length such a layer attends at most a window back, so all its distances occurred in pretraining. A skip
of positions would add others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..base.family_table import family_of
from ..rope.rotary import RotaryState, is_nested, rotary_states

# in names of layer types, as of "sliding_attention", "chunked_attention" and "hybrid_sliding"
_LOCAL = ("sliding", "chunked")
# in names of layer types with a recurrent state in place of attention
_WITHOUT_ATTENTION = ("linear", "conv", "mamba", "recurrent")
# lists in configs, with false or 0 for each layer without RoPE
_ROPE_BY_LAYER = ("no_rope_layers", "layer_rope_theta")


def is_local(layer_type: str) -> bool:
    """Whether layers of this type attend only within a window or a chunk."""
    return any(word in layer_type for word in _LOCAL)


def other_layer_types(config: Any) -> str:
    """Layer types of a config other than full and sliding-window attention, joined by commas; "" if none."""
    return ", ".join(sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}))


def far_looking_types(rope_parameters: dict[str, Any], rotary: Mapping[str, RotaryState]) -> set[str]:
    """Layer types of the model that have RoPE and are not local.

    Args:
        rope_parameters: one dictionary per layer type.
        rotary: states of the model's rotary modules.
    """
    return {layer_type for layer_type in _rotated_types(rope_parameters, rotary) if not is_local(layer_type)}


def _rotated_types(rope_parameters: dict[str, Any], rotary: Mapping[str, RotaryState]) -> set[str]:
    present = {name.removesuffix("_inv_freq") for state in rotary.values() for name in state.buffers}
    return {layer_type for layer_type, parameters in rope_parameters.items() if parameters is not None} & present


def why_no_layers(decoder: PreTrainedModel) -> str | None:
    """Why neither a rescaling nor a view has layers to act on; None if there are some."""
    config: Any = decoder.config
    layers = range(len(getattr(decoder, "layers", ())))
    can_switch = family_of(config).has_rope or any(getattr(config, name, None) for name in _ROPE_BY_LAYER)
    switched_off = bool(can_switch and layers) and not any(has_rope(config, i) for i in layers)
    if switched_off or getattr(config, "alibi", False):  # Falcon's alternative to RoPE
        return f"the config of this {type(decoder).__name__} switches RoPE off in every layer."
    rope_parameters = config.rope_parameters
    if not is_nested(rope_parameters) or far_looking_types(rope_parameters, rotary_states(decoder)):
        return None
    return "all layers of this model that have RoPE look back no further than a window of their own."


@dataclass(frozen=True)
class LocalLayers:
    """The local layers of a model, which views leave at true positions if its full-attention layers have RoPE too.

    Both fields are empty if all layers with RoPE are local, or none are: then a view moves all layers.

    Args:
        types: local layer types.
        layers: indices of local layers if they share cosines and sines with the others; empty if the rotary module is
            called once per layer type.
    """

    types: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> "LocalLayers":
        """The local layers of `decoder`."""
        rope_parameters = decoder.config.rope_parameters
        if is_nested(rope_parameters):
            rotated = _rotated_types(rope_parameters, rotary_states(decoder))
            named = frozenset(filter(is_local, rotated))
            return cls() if len(named) == len(rotated) else cls(named)
        types = getattr(decoder.config, "layer_types", None) or ()
        if not any(map(is_local, types)):
            return cls()
        present = types[: len(getattr(decoder, "layers", ()))]  # the config may name more layers than there are
        layers = {i: layer_type for i, layer_type in enumerate(present) if has_rope(decoder.config, i)}
        local = {i: layer_type for i, layer_type in layers.items() if is_local(layer_type)}
        return cls() if len(local) == len(layers) else cls(frozenset(local.values()), frozenset(local))


def has_rope(config: Any, layer: int) -> bool:
    """Whether a layer applies RoPE: some families have layers without, such as the full layers of Cohere2."""
    types = getattr(config, "layer_types", None)
    if types and any(word in types[layer] for word in _WITHOUT_ATTENTION):
        return False
    by_layer = (getattr(config, name, None) for name in _ROPE_BY_LAYER)
    if not all(layers[layer] for layers in by_layer if layers):
        return False
    rule = family_of(config).has_rope
    return rule is None or rule(config, layer)
