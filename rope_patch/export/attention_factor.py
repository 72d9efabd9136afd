"""Folding the attention factor of a RoPE scaling into the weights, for programs that ignore the configured one.

YaRN and LongRoPE multiply cosines and sines by a factor a. This scales queries and keys by a, and attention scores by
a^2. If a program takes a default d instead, queries times (a / d)^2 give the same scores.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..rope.rotary import fresh_state, is_longrope, is_nested, rotary_by_name
from .weights import plain_name

Edit = Callable[[torch.Tensor], torch.Tensor]

_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim")
# families whose queries are q_proj's output, normalised or not, and whose RoPE scaling applies to every layer
_FOLDABLE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")


def without_attention_factor(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """A copy of `rope_parameters`, nested by layer type or not, without the options that set the attention factor.

    Of LongRoPE `factor` is one of them, which then follows from the windows.
    """
    if is_nested(rope_parameters):
        return {
            layer_type: options and without_attention_factor(options) for layer_type, options in rope_parameters.items()
        }
    options = (*_OPTIONS, "factor") if is_longrope(rope_parameters["rope_type"]) else _OPTIONS
    return {key: copy.deepcopy(value) for key, value in rope_parameters.items() if key not in options}


def fold_attention_factor(causal_lm: nn.Module, decoder: Any, served: Any) -> dict[str, Edit]:
    """Edits of weights of `causal_lm`, by name, that keep its attention scores under `without_attention_factor`.

    `served` is the text config with the context window that programs will read.

    They scale queries where these are made: the weight of the query norm or, if there is none, the rows of the query
    projection and its bias. There are no edits if the factor is the default that programs take.

    Raises:
        ValueError: the family is not known to be right, or rotates only a part of the features, and the edits would
            scale the rest too.
    """
    config = decoder.config
    if config.model_type not in _FOLDABLE:
        raise ValueError(
            f"the attention factor cannot be folded into the weights of model type {config.model_type!r}, only of "
            f"{', '.join(_FOLDABLE)}: leave out {', '.join(_OPTIONS)} and train again, give no window, or export for "
            "'transformers'."
        )
    ratios = _ratios(decoder, served)
    if all(ratio == 1.0 for ratio in ratios.values()):
        return {}
    rotated = {  # features that RoPE rotates
        2 * inv_freq.numel()
        for module in rotary_by_name(decoder).values()
        for inv_freq, _ in fresh_state(module, config).buffers.values()
    }
    edits: dict[str, Edit] = {}
    for name, module in causal_lm.named_modules():
        layer = getattr(module, "layer_idx", None)
        if layer is None or not (hasattr(module, "q_proj") or hasattr(module, "qkv_proj")):
            continue
        if rotated != {module.head_dim}:
            raise ValueError(
                f"the attention factor cannot be folded into the weights: {min(rotated)} of {module.head_dim} features "
                f"are rotated, and the others must not be scaled. Leave out {', '.join(_OPTIONS)} and train again, or "
                "export for 'transformers'."
            )
        layer_type = config.layer_types[layer] if is_nested(config.rope_parameters) else ""
        if ratios[layer_type] != 1.0:
            # squared, because queries alone are scaled, for the factor of the keys too
            edits |= _edits_of_layer(plain_name(name), module, config, ratios[layer_type] ** 2)
    assert edits, "no attention layer has a query projection"
    return edits


def _ratios(decoder: Any, served: Any) -> dict[str, float]:
    """Attention factor of the model over the programs' default, by layer type; "" if all layers share one."""
    folded = copy.deepcopy(served)
    folded.rope_parameters = without_attention_factor(served.rope_parameters)
    ratios: dict[str, float] = {}
    for module in rotary_by_name(decoder).values():
        current, default = (fresh_state(module, config).attributes for config in (decoder.config, folded))
        for attribute, value in current.items():
            if attribute.endswith("attention_scaling"):
                ratios[attribute.removesuffix("attention_scaling").rstrip("_")] = value / default[attribute]
    return ratios


def _edits_of_layer(name: str, module: Any, config: Any, scale: float) -> dict[str, Edit]:
    offset = 0.0
    if hasattr(module, "q_norm"):
        # norms multiply by the weight or, as Gemma's do, by 1 + weight
        norm = copy.deepcopy(module.q_norm)
        with torch.no_grad():
            norm.weight.zero_()
            offset = float(norm(torch.ones_like(norm.weight)).abs().max() > 0)

    def scaled(weight: torch.Tensor) -> torch.Tensor:
        return ((weight.float() + offset) * scale - offset).to(weight.dtype)

    def scaled_queries(weight: torch.Tensor) -> torch.Tensor:
        # [n_heads head_dim + 2 n_kv_heads head_dim, hidden]: the queries' rows come first
        rows = config.num_attention_heads * module.head_dim
        return torch.cat([scaled(weight[:rows]), weight[rows:]])

    if hasattr(module, "q_norm"):
        return {f"{name}.q_norm.weight": scaled}
    if hasattr(module, "q_proj"):
        return {f"{name}.q_proj.weight": scaled, f"{name}.q_proj.bias": scaled}
    return {f"{name}.qkv_proj.weight": scaled_queries}  # Phi-3 has queries, keys and values in one projection
