"""Layers that look back no further than a window of their own: rescalings and views leave them as they are.

What such a layer attends to is at most a window away in a text of any length, so it never meets a distance that
training did not show it. A gap in its indices would be one.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..rope.rotary import RotaryState, is_nested, rotary_states
from .source import function_tree

# in names of layer types, as of "sliding_attention", "chunked_attention" and "hybrid_sliding"
_LOCAL = ("sliding", "chunked")

_ROTATION = re.compile(r"_?apply_rotary")


def is_local(layer_type: str) -> bool:
    """Whether layers of this type look back no further than a window or a chunk."""
    return any(word in layer_type for word in _LOCAL)


def far_looking_types(rope_parameters: dict[str, Any], rotary: Mapping[str, RotaryState]) -> set[str]:
    """Layer types with RoPE whose layers exist and are not local.

    Args:
        rope_parameters: a set for each layer type.
        rotary: states of the model's rotary modules.
    """
    return {layer_type for layer_type in _rotated_types(rope_parameters, rotary) if not is_local(layer_type)}


def _rotated_types(rope_parameters: dict[str, Any], rotary: Mapping[str, RotaryState]) -> set[str]:
    present = {name.removesuffix("_inv_freq") for state in rotary.values() for name in state.buffers}
    return {layer_type for layer_type, parameters in rope_parameters.items() if parameters is not None} & present


def why_no_layers(decoder: PreTrainedModel) -> str | None:
    """Why neither a rescaling nor a view has layers to act on, None where there are some."""
    if _applies_no_rope(decoder):
        return f"the config of this {type(decoder).__name__} switches RoPE off in every layer."
    rope_parameters = decoder.config.rope_parameters
    if not is_nested(rope_parameters) or far_looking_types(rope_parameters, rotary_states(decoder)):
        return None
    return "all layers of this model that have RoPE look back no further than a window of their own."


def _applies_no_rope(decoder: Any) -> bool:
    """Whether each layer has code that rotates and a config that keeps it from being run."""
    if getattr(decoder.config, "alibi", False):  # Falcon's other kind of positions
        return True
    layers = getattr(decoder, "layers", ())
    if any(_is_rotated(decoder, i) for i in range(len(layers))):
        return False
    return any(_rotates(type(module).forward, None) for layer in layers for module in layer.modules())


@dataclass(frozen=True)
class LocalLayers:
    """The local layers of a model whose full-attention layers have RoPE too. Views leave them at true positions.

    Both fields are empty where one table of cosines and sines serves local layers alone, or none: a view moves all
    layers there, as a rescaling of that table rescales all.

    Args:
        types: their layer types.
        layers: their indices, where one table serves layers of both kinds; empty where the rotary module is called once
            for each layer type.
    """

    types: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> "LocalLayers":
        """Those of `decoder`."""
        rope_parameters = decoder.config.rope_parameters
        if is_nested(rope_parameters):
            rotated = _rotated_types(rope_parameters, rotary_states(decoder))
            named = frozenset(filter(is_local, rotated))
            return cls() if len(named) == len(rotated) else cls(named)
        types = dict(enumerate(getattr(decoder.config, "layer_types", None) or ()))
        if not any(map(is_local, types.values())):
            return cls()
        layers = {i: layer_type for i, layer_type in types.items() if _is_rotated(decoder, i)}
        local = {i: layer_type for i, layer_type in layers.items() if is_local(layer_type)}
        return cls() if len(local) == len(layers) else cls(frozenset(local.values()), frozenset(local))


def _is_rotated(decoder: Any, layer: int) -> bool:
    """Whether a layer applies RoPE: in some families those of one kind do not, as the full ones of Cohere2."""
    layers = getattr(decoder, "layers", ())
    bases = getattr(decoder.config, "layer_rope_theta", None)  # 0 stands for no RoPE
    if layer >= len(layers) or (bases is not None and not bases[layer]) or not _gets_embeddings(decoder, layer):
        return False
    return any(_rotates(type(module).forward, module) for module in layers[layer].modules())


def _gets_embeddings(decoder: Any, layer: int) -> bool:
    """Whether a decoder hands cosines and sines to a layer: that of LaraMini gives `None` to the full ones."""
    tree = function_tree(type(decoder).forward)
    if tree is None:
        return True
    layer_types = getattr(decoder.config, "layer_types", None)
    names = {
        "self": decoder,
        "layer_type": layer_types and layer_types[layer],
        "decoder_layer": decoder.layers[layer],
        "i": layer,
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "position_embeddings" and isinstance(node.value, ast.IfExp):
            is_true = _value(node.value.test, names)
            chosen = node.value.body if is_true else node.value.orelse
            if is_true is not None and isinstance(chosen, ast.Constant) and chosen.value is None:
                return False
    return True


def _rotates(forward: Callable[..., Any], module: nn.Module | None) -> bool:
    """Whether `forward` applies RoPE as a method of `module`, of some module if None."""
    tree = function_tree(forward)
    return tree is not None and _reaches_rotation(tree.body, module)


def _reaches_rotation(statements: Sequence[ast.stmt], module: nn.Module | None) -> bool:
    """Whether a call of apply_rotary... is run; both branches are, where the arguments of a call decide."""
    for statement in statements:
        if isinstance(statement, ast.If):
            is_true = _value(statement.test, {"self": module})
            branches = [*(statement.body if is_true is not False else ()), *(statement.orelse if not is_true else ())]
            if _reaches_rotation(branches, module):
                return True
        elif any(_ROTATION.match(node.id) for node in ast.walk(statement) if isinstance(node, ast.Name)):
            return True
    return False


def _value(condition: ast.expr, names: dict[str, Any]) -> bool | None:
    """What a condition on `names` comes to, None if it depends on more than those."""
    try:
        return bool(eval(compile(ast.Expression(condition), "<condition>", "eval"), names))
    except Exception:  # names of arguments, and whatever they would be asked for
        return None
