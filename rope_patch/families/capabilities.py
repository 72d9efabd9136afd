"""What a model family cannot do, and why. Losses check it before they start, and `describe` shows it."""

import inspect
import re
import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..base.family_table import family_of
from ..rope.layerwise import hands_embeddings
from ..rope.rotary import (
    find_causal_lm,
    find_decoder,
    is_nested,
    is_of_other_modality,
    layers_call_rotary,
    named_rotary_modules,
    rotary_states,
    text_modules,
)
from ..views.base import TRUE_POSITIONS
from .attention_calls import attention_kernel, attention_name
from .local_layers import LocalLayers, other_layer_types, why_no_layers

# in names of classes that carry a state from token to token: it would run from a suffix on into its copies
_MIXES_TOKENS = re.compile("Mamba|Conv|SSM|Recurrent|Delta|Rwkv|LinearAttention|Lightning")
_MODELLING_FILES = ("transformers.models.", "transformers_modules.")  # the second are files of the Hub
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def missing_capabilities(model: nn.Module) -> dict[str, str]:
    """What a model with RoPE cannot do -> the reason."""
    causal_lm, decoder = find_causal_lm(model), find_decoder(model)
    reasons = {
        "views": why_no_views(decoder, LocalLayers.of(decoder)),
        "native_rope": why_no_native_rope(decoder),
        "gradient checkpointing": why_no_checkpointing(decoder),
        "self-distillation": why_no_self_distillation(causal_lm, decoder),
        "relation distillation": why_no_relations(causal_lm, decoder),
    }
    if reasons["self-distillation"] is None:
        two = why_two_passes(causal_lm, decoder)
        reasons["self-distillation in one pass"] = two and f"the model has {two}."
    return {what: reason for what, reason in reasons.items() if reason is not None}


def why_no_views(decoder: Any, local: LocalLayers) -> str | None:
    """Why a view has no layers to act on; `local` ones do not count."""
    reason = why_no_layers(decoder)
    if reason is not None:
        return f"a view acts on layers that look back over a whole text, and {reason}"
    scale = _scale_by_position(decoder.config)
    if scale is not None:
        return (
            f"{type(decoder).__name__} scales queries by their position ({scale}) beside RoPE, and a view moves RoPE "
            f"alone. Use view {TRUE_POSITIONS!r}; rescalings and distillation at true positions go with it."
        )
    if local.layers and not hands_embeddings(decoder):
        return (
            f"a view leaves local layers at true positions, and {type(decoder).__name__} does not hand cosines and "
            "sines to each of its layers, local and others."
        )
    return None


def _scale_by_position(config: Any) -> str | None:
    """The option or family by which a config scales queries by their position, in any layer."""
    rope_parameters = config.rope_parameters
    if not is_nested(rope_parameters) and rope_parameters.get("llama_4_scaling_beta"):
        return "llama_4_scaling_beta"
    # Llama 4 does so in its layers without RoPE
    if getattr(config, "attn_temperature_tuning", False) and 0 in getattr(config, "no_rope_layers", ()):
        return "attn_temperature_tuning"
    return family_of(config).query_scale


def why_no_layers_apart(decoder: nn.Module) -> str | None:
    """Why layers cannot have different positions.

    They can if one rotary module with one set of RoPE parameters computes cosines and sines for all layers.
    """
    rope_types = [rotary.attributes.get("rope_type") for rotary in rotary_states(decoder).values()]
    one_pair = not layers_call_rotary(decoder) and len(rope_types) == 1 and not isinstance(rope_types[0], dict)
    if one_pair and hands_embeddings(decoder):
        return None
    return (
        f"{type(decoder).__name__} does not hand one pair of cosines and sines to each of its layers, which a view "
        "with positions of their own in some layers needs: take one that moves all layers alike."
    )


def why_no_checkpointing(decoder: nn.Module) -> str | None:
    """Why a view and gradient checkpointing do not go together."""
    if layers_call_rotary(decoder):
        return (
            f"{type(decoder).__name__} applies RoPE inside its layers, which gradient checkpointing runs again in "
            "backward, when the view has ended: gradients would be wrong. Switch gradient checkpointing off."
        )
    return None


def why_no_self_distillation(causal_lm: nn.Module, decoder: nn.Module) -> str | None:
    """Why a model cannot be distilled from itself under another view."""
    reason = why_unreachable(causal_lm, decoder) or why_no_losses(causal_lm, decoder)
    if reason is None and layers_call_rotary(decoder):
        return (
            f"{type(causal_lm).__name__} computes RoPE inside its layers, which have one view a step: objective "
            "'self-distill' needs two. Use objective='clm' with the view."
        )
    return reason


def why_two_passes(causal_lm: nn.Module, decoder: Any) -> str | None:
    """Why a model needs two passes for two views; None if one pass is exact."""
    kernel = attention_kernel(causal_lm)
    if kernel is None:
        return f"attention implementation {attention_name(causal_lm)!r}"
    if kernel == "flash" and _aligns_masks_at_the_top():
        return "a FlashAttention that aligns causal masks at the first query"
    config = decoder.config
    if other := other_layer_types(config):
        return f"layers of type {other}"
    keeps = keeps_from_attention(decoder)
    if keeps is not None:
        return f"attention that cannot be told of copies: {keeps}"
    if any(hasattr(module, "mrope_section") for _, module in named_rotary_modules(decoder)):
        return "positions with several axes, which take another shape than those of tokens"
    absolute = why_not_relative(decoder)
    if absolute is not None:
        return absolute
    for _, module in text_modules(decoder):
        if _MIXES_TOKENS.search(type(module).__name__):
            return f"{type(module).__name__}, which carries a state from token to token"
        if is_noisy(module):
            return f"dropout or noise in {type(module).__name__}, which two passes draw apart"
    if kernel == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        return "soft-capped attention scores"
    return None


def why_no_head(causal_lm: Any, decoder: nn.Module) -> str | None:
    """Why logits are not the product of last hidden states and a matrix, scaled and capped."""
    if causal_lm is decoder:
        return None
    head = causal_lm.get_output_embeddings()
    if head is None:  # such as a classifier
        return f"{type(causal_lm).__name__} has no output head over the vocabulary, whose logits losses of tokens need."
    for name, child in causal_lm.named_children():
        beside = child is not head and decoder not in child.modules() and any(True for _ in child.parameters())
        if beside and not is_of_other_modality(name):
            return (
                f"{type(causal_lm).__name__} puts its {name} ({type(child).__name__}) between the decoder and the "
                "output head, and losses of hidden states take the head alone."
            )
    return None


def why_no_losses(causal_lm: Any, decoder: nn.Module) -> str | None:
    """Why the weight of the output head does not give the logits of the model."""
    head = causal_lm.get_output_embeddings()
    if causal_lm is decoder or head is None:
        return why_no_head(causal_lm, decoder)
    if hasattr(head, "base_layer"):
        return (
            "the output head has an adapter, which a loss through its weight would leave out without an error: take "
            "lm_head out of target_modules, or train it whole with modules_to_save=['lm_head']."
        )
    if type(head).forward is not nn.Linear.forward and type(head).__module__.startswith(_MODELLING_FILES):
        return (
            f"the output head, {type(head).__name__}, computes logits in a forward of its own, and losses of hidden "
            "states multiply by its weight alone."
        )
    return why_no_head(causal_lm, decoder)


def why_no_relations(causal_lm: nn.Module, decoder: nn.Module) -> str | None:
    """Why the queries, keys and values of attention cannot be read."""
    keeps = keeps_from_attention(decoder)
    return why_unreachable(causal_lm, decoder) or (keeps and f"{keeps}, so that relations cannot be distilled.")


def why_no_native_rope(decoder: Any) -> str | None:
    """Why a block cannot run with the native RoPE parameters while the config stays."""
    reason, reader = why_fixed_frequencies(decoder), family_of(decoder.config).rope_parameters_from_config
    if reason is None and reader is not None:
        reason = f"{reader} reads the RoPE parameters from the config in every forward"
    return reason and f"{reason}, so the native ones cannot be put in force for a while: use a copy."


def why_fixed_frequencies(decoder: Any) -> str | None:
    """Why a forward always has the frequencies of the config."""
    reader = family_of(decoder.config).frequencies_from_config
    return reader and f"{reader} works its frequencies out from the config in every forward"


def why_not_relative(decoder: Any) -> str | None:
    """Why a shift of all indices changes predictions; None if it does not."""
    return family_of(decoder.config).not_relative


def is_noisy(module: Any) -> bool:
    """Whether a module is random in training, by a rate of dropout or jitter."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    return any(
        isinstance(rate, float) and rate > 0 and any(word in name for word in ("dropout", "pdrop", "jitter"))
        for name, rate in vars(module).items()
    )


def _aligns_masks_at_the_top() -> bool:
    from transformers.integrations import flash_attention

    return flash_attention._use_top_left_mask  # before FlashAttention 2.1


def has_sinks(decoder: nn.Module) -> bool:
    """Whether layers have attention sinks: an extra score per head in the softmax, without a value."""
    return any(getattr(module, "sinks", None) is not None for _, module in text_modules(decoder))


def keeps_from_attention(decoder: nn.Module) -> str | None:
    """Why keyword arguments of a forward do not reach the attention functions of Transformers; None if they do."""
    if computes_own_attention(decoder):
        return f"{type(decoder).__name__} computes attention in code of its own, outside Transformers' functions"
    modules = dict(decoder.named_modules())
    chain = {type(modules[part]) for name in _names_of_attention(decoder) for part in _above(name)}
    kinds = [kind.__name__ for kind in chain - set(_CONTAINERS) if not _passes_on(kind, decoder)]
    return f"{min(kinds)} does not pass keyword arguments on to attention" if kinds else None


def why_unreachable(causal_lm: nn.Module, decoder: nn.Module) -> str | None:
    """Why a keyword argument of a causal LM does not reach its decoder; None if it does."""
    modules = dict(causal_lm.named_modules())
    name = next(name for name, module in modules.items() if module is decoder)
    for part in _above(name)[:-1]:  # without the decoder itself
        kind = type(modules[part])
        if not _passes_on(kind, decoder):
            return (
                f"{kind.__name__} does not pass keyword arguments on to its decoder, so a distillation cannot reach it."
            )
    return None


def computes_own_attention(decoder: nn.Module) -> bool:
    """Whether no layer uses Transformers' table of attention functions, where calls are watched."""
    kinds = [
        kind for kind in type(decoder).__mro__ if issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel
    ]
    tables = [vars(sys.modules[kind.__module__]).get("ALL_ATTENTION_FUNCTIONS") for kind in kinds]
    return all(table is not ALL_ATTENTION_FUNCTIONS for table in tables) or not _names_of_attention(decoder)


def _names_of_attention(decoder: nn.Module) -> list[str]:
    """Names of the attention modules: Transformers' attention functions read their `is_causal`."""
    return [name for name, module in text_modules(decoder) if hasattr(module, "is_causal")]


def _above(name: str) -> list[str]:
    """The names of a module and of all modules around it, outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def _passes_on(kind: type[nn.Module], decoder: Any) -> bool:
    """Whether the `forward` of a module passes its **kwargs on."""
    takes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind.forward).parameters.values())
    return takes and kind.__name__ not in family_of(decoder.config).drops_keywords
