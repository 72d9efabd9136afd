"""Folding a rescaling's attention factor into the weights, for programs that take its default whatever is written.

YaRN and LongRoPE multiply cosines and sines by a, and so queries and keys, and so attention scores by a^2. Where a
program takes d instead, queries times (a / d)^2 give the same scores.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..rope.rotary import fresh_state, is_nested, rotary_by_name
from .weights import plain_name

Edit = Callable[[torch.Tensor], torch.Tensor]

_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim")
# of these it is known that a query is q_proj's output, normalised or not, and that a rescaling reaches every layer
_FOLDABLE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")


def without_attention_factor(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or those of each layer type, without what sets the attention factor."""
    if is_nested(rope_parameters):
        by_type = rope_parameters.items()
        return {layer_type: options and without_attention_factor(options) for layer_type, options in by_type}
    return {key: copy.deepcopy(value) for key, value in rope_parameters.items() if key not in _OPTIONS}


def fold_attention_factor(causal_lm: nn.Module, decoder: Any) -> dict[str, Edit]:
    """Edits of the weights of `causal_lm`, by name, that keep attention scores under `without_attention_factor`.

    Queries are scaled where they are made: the rows of the query projection and its bias or, where queries are
    normalised after that, the weight of the norm. There are none where the factor is the one that programs take anyway.

    Raises:
        ValueError: of a family for which that is not known to be right, or that rotates a part of the features alone,
            of which the rest would be scaled too.
    """
    config = decoder.config
    if config.model_type not in _FOLDABLE:
        raise ValueError(
            f"the attention factor cannot be folded into the weights of model type {config.model_type!r}, only of "
            f"{', '.join(_FOLDABLE)}: leave out {', '.join(_OPTIONS)} and train again, or export for 'transformers'."
        )
    ratios = _ratios(decoder)
    if all(ratio == 1.0 for ratio in ratios.values()):
        return {}  # what is written is what programs take by default
    edits: dict[str, Edit] = {}
    for name, module in causal_lm.named_modules():
        layer = getattr(module, "layer_idx", None)
        if layer is None or not (hasattr(module, "q_proj") or hasattr(module, "qkv_proj")):
            continue
        layer_type = config.layer_types[layer] if is_nested(config.rope_parameters) else ""
        _require_full_rotary(decoder, module.head_dim)
        if ratios[layer_type] != 1.0:
            edits |= _of_layer(plain_name(name), module, config, ratios[layer_type] ** 2)
    assert edits, "no attention layer has a query projection"
    return edits


def _ratios(decoder: Any) -> dict[str, float]:
    """Attention factor in force over the one that programs take, by layer type; "" where there is one for all."""
    folded = copy.deepcopy(decoder.config)
    folded.rope_parameters = without_attention_factor(decoder.config.rope_parameters)
    ratios: dict[str, float] = {}
    for module in rotary_by_name(decoder).values():
        own, default = (fresh_state(module, config).attributes for config in (decoder.config, folded))
        for attribute, value in own.items():
            if attribute.endswith("attention_scaling"):
                ratios[attribute.removesuffix("attention_scaling").rstrip("_")] = value / default[attribute]
    return ratios


def _require_full_rotary(decoder: Any, head_dim: int) -> None:
    for module in rotary_by_name(decoder).values():
        for buffer, _ in fresh_state(module, decoder.config).buffers.values():
            if 2 * buffer.numel() != head_dim:
                raise ValueError(
                    f"the attention factor cannot be folded into the weights: {2 * buffer.numel()} of {head_dim} "
                    f"features are rotated, and the others must not be scaled. Leave out {', '.join(_OPTIONS)} and "
                    "train again, or export for 'transformers'."
                )


def _of_layer(name: str, module: Any, config: Any, scale: float) -> dict[str, Edit]:
    offset = _offset(module.q_norm) if hasattr(module, "q_norm") else 0.0

    def scaled(weight: torch.Tensor) -> torch.Tensor:
        return ((weight.float() + offset) * scale - offset).to(weight.dtype)

    def scaled_queries(weight: torch.Tensor) -> torch.Tensor:
        rows = config.num_attention_heads * module.head_dim
        return torch.cat([scaled(weight[:rows]), weight[rows:]])

    if hasattr(module, "q_norm"):
        return {f"{name}.q_norm.weight": scaled}
    if hasattr(module, "q_proj"):
        return {f"{name}.q_proj.weight": scaled, f"{name}.q_proj.bias": scaled}
    return {f"{name}.qkv_proj.weight": scaled_queries}  # of Phi-3: queries, keys and values in one


def _offset(norm: nn.Module) -> float:
    """1.0 for norms that multiply by 1 + weight, as Gemma's, 0.0 for those that multiply by the weight."""
    norm = copy.deepcopy(norm)
    weight: Any = norm.weight
    with torch.no_grad():
        weight.zero_()
        return float(norm(torch.ones_like(weight)).abs().max() > 0)
