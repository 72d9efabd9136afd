"""Every causal-LM family of the installed Transformers that has RoPE, as a tiny random model.

Families come from Transformers' own mapping, sizes from one table of names that configs use: a family that a newer
Transformers adds is built without a change here, unless its config has sizes of its own.
"""

import copy
import inspect
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .marks import BEFORE_5_17
from .tiny import VOCAB, WINDOW

LAYERS = 2
# their code before Transformers 5.17 is another, which this package is not written for
SINCE_5_17 = {"cohere_compass_text", "falcon_h1", "moshi", "recurrent_gemma"}
MOST_PARAMETERS = 9_000_000

# by the name that a config gives it; a config that has no such name does not see it
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "embed_dim", "dim", "dim_model", "lru_width"), 64),
    **dict.fromkeys(("block_dim", "conv_dim", "width", "hidden_size_global", "nemo_conv_channels"), 64),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_hidden_size",
            "mlp_hidden_size",
            "d_ff",
            "n_inner",
            "block_ff_dim",
            "dim_ff",
            "ffn_dim",
        ),
        96,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "num_key_value_groups"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "kv_channels", "dim_head", "swa_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 12),
    "rotary_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), WINDOW),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers",), 1),
    # latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "v_head_dim", "qk_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("index_n_heads", "o_groups"), 2),
    "index_topk": 8,
    # layers that carry a state
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_attn_num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_expand",), 2),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    "mamba_d_ssm": 128,
    # what lies beside the decoder
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("num_codebooks",), 2),
    **dict.fromkeys(("audio_vocab_size",), 64),
}


DROP = object()

# what a family's config needs beyond that
_SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},  # none by default
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {
        "layer_types": DROP,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}, "max_seq_len": WINDOW},
    **dict.fromkeys(
        ("dots3_note_text",),
        {
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 16,
        },
    ),
    "gemma3n_text": {"num_kv_shared_layers": 0, "altup_num_inputs": 2, "laurel_rank": 4},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), {"global_head_dim": 32}),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16, "num_layers": 2, "num_hidden_layers": DROP},
    "ministral3": {  # whose queries grow with the position, here within the row
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "minicpm3": {"scale_emb": 1, "scale_depth": 4.0},
    "minimax": {"sliding_window": None},  # the mask of a window goes by layer 0 of its cache, which has no keys
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba2": {"use_mem_rope": True, "layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"]},
}


@cache
def _source(model_class: str) -> str:
    """The modelling file of a class, without importing it."""
    module = transformers._class_to_module.get(model_class)
    path = Path(transformers.__file__).parent / f"{(module or '').replace('.', '/')}.py"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _class_name(family: str) -> str:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return name if isinstance(name, str) else name[0]


def _model_class(family: str) -> type[PreTrainedModel]:
    return getattr(transformers, _class_name(family))


def _config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    default = config_class()
    names = set(default.to_dict()) | set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
    inner = {name: type(value) for name, value in vars(default).items() if isinstance(value, PreTrainedConfig)}
    sizes = {name: size for name, size in _SIZES.items() if name in names}
    for name, value in vars(default).items():  # two runs are to give the same
        if isinstance(value, float) and any(word in name for word in ("dropout", "pdrop", "jitter")):
            sizes[name] = 0.0
    if vars(default).get("q_lora_rank", 0) is None:
        del sizes["q_lora_rank"]
    if "qk_rope_head_dim" in sizes:  # head_dim follows from the parts, and there is one key a query head
        sizes.pop("head_dim", None)
        sizes.pop("qk_head_dim", None)
        if "num_key_value_heads" in sizes:
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {name: _config(kind) for name, kind in inner.items()}
    types = vars(default).get("layer_types")
    if types:
        kinds = list(dict.fromkeys(types))
        if "full_attention" in kinds:
            kinds = [k for k in kinds if k != "full_attention"] + ["full_attention"]
        kinds = kinds * math.ceil(LAYERS / len(kinds))
        sizes["layer_types"] = kinds
        sizes["num_hidden_layers"] = len(kinds)
    sizes |= _SETTINGS.get(config_class.model_type, {})
    return config_class(**{k: v for k, v in sizes.items() if v is not DROP})


_ROTATES = re.compile(
    r"^class (?!.*(?:Vision|Visual|Audio))\w*(?:Rotary|RoPE|Rope)\w*Embed|(?<!def )\bapply_rotary(?!\w*_vision)\w*\(",
    re.MULTILINE,
)

# a drafter for another model, to whose keys it attends: no language model of its own
_DRAFTS = re.compile(r"class \w+Assistant\w*ForCausalLM\(")


def _has_rope(family: str) -> bool:
    source = _source(_class_name(family))
    if _DRAFTS.search(source):
        return False
    if "AutoModel" in source and not _ROTATES.search(source):  # the decoder is another family's
        inner = _model_class(family).config_class().get_text_config(decoder=True).model_type
        source = _source(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(inner, ""))
    return bool(_ROTATES.search(source))


@cache
def families() -> list[str]:
    """Model types that Transformers lists as causal LMs and whose modelling file rotates something."""
    unknown = SINCE_5_17 if BEFORE_5_17 else set()
    return sorted(family for family in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - unknown if _has_rope(family))


@cache
def _built(family: str) -> PreTrainedModel:
    model_class = _model_class(family)
    try:
        config = _config(model_class.config_class)
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"it has {size} parameters")
        torch.manual_seed(0)
        model = model_class(config).eval()
        for parameter in model.parameters():
            with torch.no_grad():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.12)
                else:
                    parameter.nan_to_num_(0.0).add_(torch.randn(parameter.shape) * 0.1)
        with torch.no_grad():
            model(torch.arange(3, 11)[None], use_cache=False)
    except ImportError as error:
        pytest.skip(f"Transformers needs another package for {family}: {str(error).strip().splitlines()[0]}")
    except Exception as error:
        raise RuntimeError(
            f"no tiny model of family {family!r} could be built and run: {type(error).__name__}: {error}. Add what its "
            "config needs to _SETTINGS in tests/support/families.py."
        ) from error
    return model


def tiny_family(family: str) -> PreTrainedModel:
    """A fresh copy of the tiny random model."""
    return copy.deepcopy(_built(family))
