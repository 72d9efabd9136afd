"""Where the attention of a family computes its queries, so that they can be scaled by position."""

from typing import Any

from torch import nn

from ..base.family_table import family_of
from ..rope.layerwise import QueryPlace, hands_embeddings
from ..rope.rotary import is_nested, layers_call_rotary, text_modules
from .local_layers import is_local

BETA = "llama_4_scaling_beta"
"""Key of `rope_parameters` by which Ministral 3 and Mistral 4 scale queries, with L0 beside it."""
RECORD = "rope_patch_query_scale"
"""Key of `rope_parameters` with name and options of a rescaling that scales queries, for the other families.

Transformers does not know it, and says so when it loads the model."""

# a norm behind the projection would undo a scale before it; the second projection of latent attention gives queries
_MODULES = ("q_norm", "q_layernorm", "query_layernorm", "qk_norm", "q_b_proj", "q_proj")


def scales_queries(rope_parameters: dict[str, Any]) -> bool:
    """Whether RoPE parameters name a scale of queries by position, in the words of Transformers or in ours."""
    return bool(rope_parameters.get(BETA)) or records_query_scale(rope_parameters)


def records_query_scale(rope_parameters: dict[str, Any]) -> bool:
    """Whether RoPE parameters name a scale of queries that Transformers does not read."""
    parameter_sets = rope_parameters.values() if is_nested(rope_parameters) else [rope_parameters]
    return any(parameters and RECORD in parameters for parameters in parameter_sets)


def why_no_query_scale(decoder: Any) -> str | None:
    """Why queries cannot be scaled by their position; None if they can."""
    kind = type(decoder).__name__
    handed = hands_embeddings(decoder) and not family_of(decoder.config).hands_no_embeddings
    if layers_call_rotary(decoder) or not handed:
        return f"a scale of queries goes with cosines and sines to each layer, which {kind} does not hand to them."
    places = query_places(decoder)
    if places == {}:
        return "a scale of queries is for layers that look back over a whole text, and this model has none."
    if places is None or not any(places.values()):
        return f"a scale of queries needs a module that gives the queries of a layer, and {kind} has none."
    return None


def query_places(decoder: Any) -> dict[int, list[QueryPlace]] | None:
    """Layer -> where its attention gives its queries, of layers that look back over a whole text; None if unknown."""
    types = getattr(decoder.config, "layer_types", None)
    places: dict[int, list[QueryPlace]] = {}
    for number, layer in enumerate(decoder.layers):
        if types and is_local(types[number]):
            continue
        # Transformers' attention functions read `is_causal`; images have no positions in the text
        attends = [(n, m) for n, m in text_modules(layer) if hasattr(m, "is_causal") and "cross" not in n]
        found = [_place(name, attention, decoder.config) for name, attention in attends]
        if None in found:
            return None
        places[number] = [place for place in found if place is not None]
    return places


def _place(name: str, attention: Any, config: Any) -> QueryPlace | None:
    children = dict(attention.named_children())
    for child in _MODULES:
        if child in children and not (child == "qk_norm" and "q_proj" not in children):  # Zaya's gives both at once
            return QueryPlace(name, child, by_head=family_of(config).norms_by_head)
    head_dim: int = attention.head_dim if hasattr(attention, "head_dim") else getattr(attention, "head_size", 0)
    if isinstance(getattr(children.get("qkv_proj"), "weight", None), nn.Parameter):  # Phi-3: all queries first
        width: int = config.num_attention_heads * head_dim
        return QueryPlace(name, "qkv_proj", fused=(width, width + 2 * config.num_key_value_heads * head_dim))
    if "query_key_value" in children:  # GPT-NeoX: query, key and value of each head
        return QueryPlace(name, "query_key_value", fused=(head_dim, 3 * head_dim))
    return None
