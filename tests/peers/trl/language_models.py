"""Tiny random language models under the names that TRL's tests load."""

import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .tokenizer import Vocabulary

StandIn = tuple[PreTrainedModel, PreTrainedTokenizerFast]

# family -> what its tokenizer and its config have beside the sizes below; the key follows "tiny-" in TRL's name
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2ForCausalLM-2.5": ({"template": "qwen2_5"}, {}),
    "Qwen3ForCausalLM": ({"template": "qwen3"}, {}),
    "Qwen3MoeForCausalLM": (
        {"template": "qwen3"},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "GPTNeoXForCausalLM": ({"template": None, "eos": "<|endoftext|>", "bos": "<|endoftext|>"}, {}),
    "GptOssForCausalLM": (
        {"template": "gptoss", "eos": "<|return|>", "bos": "<|startoftext|>"},
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Glm4MoeForCausalLM": (
        {"template": "glm4moe", "eos": "<|endoftext|>"},
        {"moe_intermediate_size": 32, "head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
    ),
    "Olmo3ForCausalLM": ({"template": "qwen2_5", "eos": "<|endoftext|>"}, {"use_cache": False}),
    "Lfm2ForCausalLM": (
        {"template": "lfm2", "pad": "<pad>", "bos": "<|startoftext|>"},
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    ),
    "Lfm2ForCausalLM-2.5": (
        {"template": "lfm2_2_5", "pad": "<pad>", "bos": "<|startoftext|>"},
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "Cohere2ForCausalLM": (
        {"template": "cohere2", "eos": "<|END_OF_TURN_TOKEN|>", "pad": "<PAD>", "bos": "<BOS_TOKEN>"},
        {"logit_scale": 1.0},
    ),
    "NemotronHForCausalLM-nano": (
        {"template": "nemotron_3_nano", "bos": "<s>"},
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            **{"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
            **{"hidden_size": 16, "ssm_state_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False},
        },
    ),
}


def sizes(tokenizer: PreTrainedTokenizerFast, **own: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **own,
    }


def stand_ins(vocabulary: Vocabulary) -> dict[str, StandIn]:
    made = {}
    for family, (of_tokenizer, of_config) in FAMILIES.items():
        model_class = getattr(transformers, family.partition("-")[0])
        tokenizer = vocabulary.tokenizer(**of_tokenizer)
        made[f"tiny-{family}"] = model_class(model_class.config_class(**sizes(tokenizer, **of_config))), tokenizer
    return made


def with_own_code(vocabulary: Vocabulary, checkout: Path) -> StandIn:
    """The model whose code TRL keeps in a folder of its scripts, and which a test loads with trust_remote_code."""
    sys.path.insert(0, str(checkout / "scripts/generate_tiny_models/for_causal_lm"))
    from _remote_code.configuration_remote import RemoteConfig
    from _remote_code.modeling_remote import RemoteForCausalLM, RemoteModel

    RemoteConfig.register_for_auto_class()
    RemoteModel.register_for_auto_class("AutoModel")
    RemoteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    tokenizer = vocabulary.tokenizer(
        "llama3_2", eos="<|eot_id|>", pad="<|finetune_right_pad_id|>", bos="<|begin_of_text|>"
    )
    return RemoteForCausalLM(RemoteConfig(**sizes(tokenizer))), tokenizer
