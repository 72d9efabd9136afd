"""Facts about model types that neither config nor modules show.

tests/families/test_table.py compares the table with the modeling code of the installed Transformers: it fails for a
family that a newer version adds or changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """Facts about the modeling code of a model type.

    Args:
        has_rope: whether layer i of a model with this config applies RoPE; None if each attention layer does.
        no_rotary_module: why there is no rotary module whose positions could be moved.
        frequencies_from_config: class that computes its frequencies from the config in every forward.
        rope_parameters_from_config: class that reads RoPE parameters from the config in every forward.
        query_scale: what scales queries by their position beside RoPE, of which a view cannot be told.
        hands_no_embeddings: whether layers without RoPE get no cosines and sines.
        norms_by_head: whether queries are normed as [batch, n_heads, n, head_dim], not [batch, n, n_heads, head_dim].
        not_relative: what makes scores depend on more than differences of RoPE indices.
        drops_keywords: classes whose forward takes keyword arguments and does not pass them on.
        sees_beyond_window: whether queries see all earlier tokens although the config has a sliding window, which only
            limits the KV cache.
    """

    has_rope: Callable[[Any, int], bool] | None = None
    no_rotary_module: str | None = None
    frequencies_from_config: str | None = None
    rope_parameters_from_config: str | None = None
    query_scale: str | None = None
    hands_no_embeddings: bool = False
    norms_by_head: bool = False
    not_relative: str | None = None
    drops_keywords: tuple[str, ...] = ()
    sees_beyond_window: bool = False


def family_of(config: Any) -> Family:
    """The facts about the model type of a config."""
    return FAMILIES.get(config.model_type, Family())


# values of `has_rope`: what the attention layers of these families ask before they rotate
def _is_sliding(config: Any, i: int) -> bool:
    return config.layer_types[i] == "sliding_attention"


def _has_window(config: Any, i: int) -> bool:
    return config.sliding_window is not None and _is_sliding(config, i)


def _has_window_or_is_dense(config: Any, i: int) -> bool:
    dense = config.mlp_layer_types[i] == "dense" and config.prefix_dense_sliding_window_pattern == 1
    return dense or _has_window(config, i)


def _is_sliding_or_none_is(config: Any, i: int) -> bool:
    return config.sliding_window is None or _is_sliding(config, i)


_TABLE_OF_SINES = "it gathers sines from a table of n_positions rows inside attention, which holds no other index"
_WEIGHTS_AFTER_ROPE = "weights on queries and keys after RoPE, so that a shift of all indices counts"

_AROUND_FALCON = ("FalconForCausalLM", "FalconForSequenceClassification", "FalconForTokenClassification")

FAMILIES = {
    "afmoe": Family(has_rope=_is_sliding),
    "apertus": Family(norms_by_head=True),
    "apertus1p5_text": Family(norms_by_head=True),
    "codegen": Family(no_rotary_module=_TABLE_OF_SINES),
    "cohere2": Family(has_rope=_has_window),
    "cohere2_moe": Family(has_rope=_has_window_or_is_dense),
    "dory": Family(not_relative=_WEIGHTS_AFTER_ROPE),
    "exaone4": Family(has_rope=_is_sliding_or_none_is, norms_by_head=True),
    "exaone4_5": Family(has_rope=_is_sliding_or_none_is, norms_by_head=True),
    "exaone_moe": Family(has_rope=_is_sliding_or_none_is, norms_by_head=True),
    "falcon": Family(drops_keywords=_AROUND_FALCON),
    "flint": Family(has_rope=_has_window),
    "gemma3_text": Family(norms_by_head=True),
    "gpt_neox_japanese": Family(drops_keywords=("GPTNeoXJapaneseForCausalLM",)),
    "gptj": Family(no_rotary_module=_TABLE_OF_SINES),
    "hunyuan_v1_dense": Family(not_relative=_WEIGHTS_AFTER_ROPE, norms_by_head=True),
    "hunyuan_v1_moe": Family(not_relative=_WEIGHTS_AFTER_ROPE, norms_by_head=True),
    "hy_v3": Family(norms_by_head=True),
    "kolibri1": Family(has_rope=_is_sliding_or_none_is, norms_by_head=True),
    "lara_mini": Family(has_rope=_is_sliding, hands_no_embeddings=True),
    "ministral3": Family(rope_parameters_from_config="Ministral3Attention"),
    "mistral4": Family(rope_parameters_from_config="Mistral4Attention"),
    "mistral_large4_text": Family(query_scale="a learned scale"),
    "moshi": Family(sees_beyond_window=True),
    "nanochat": Family(norms_by_head=True),
    "nemotron": Family(drops_keywords=("NemotronDecoderLayer",)),
    "phi": Family(norms_by_head=True),
    "phimoe": Family(frequencies_from_config="PhimoeRotaryEmbedding"),
    "roformer": Family(no_rotary_module="it rotates by token index and never looks at positions"),
    "stablelm": Family(drops_keywords=("StableLmDecoderLayer",), norms_by_head=True),
}
