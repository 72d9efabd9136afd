"""Tiny random models of the families that the tests go through."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 101
WINDOW = 64
SLIDING_WINDOW = 7

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# sliding and full layers in one model: for tiny("qwen3", **MIXED)
MIXED = {
    "use_sliding_window": True,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": SLIDING_WINDOW}),
}


def tiny(
    family: str = "llama", attention: str = "sdpa", dtype: torch.dtype = torch.float32, **config
) -> PreTrainedModel:
    """A random model in eval mode whose positions matter: weights large enough that attention is not uniform."""
    model_class, config_class, special = FAMILIES[family]
    shape = {**_SHAPE, **special, **config}
    if family == "qwen2":
        shape.pop("head_dim")  # Qwen2 takes hidden_size / n_heads
    torch.manual_seed(0)
    return _spread(model_class._from_config(config_class(**shape), attn_implementation=attention)).to(dtype)


def gemma3(vocabulary: int = VOCAB, window: int = WINDOW) -> PreTrainedModel:
    """A sliding layer, then a full one, whose rotary module is called once for each kind."""
    shape = {**_SHAPE, "num_hidden_layers": 2, "sliding_window": SLIDING_WINDOW + 1}
    shape |= {"vocab_size": vocabulary, "max_position_embeddings": window}
    torch.manual_seed(0)
    return _spread(Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=["sliding_attention", "full_attention"])))


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tokens(*shape: int) -> torch.Tensor:
    """Random token ids without special ones."""
    return torch.randint(3, VOCAB, shape)


def transformed_logits(kind: str) -> PreTrainedModel:
    """A family that scales or caps its logits: "Gemma2", "Cohere" or "Granite"."""
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
    )

    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    shape = {**shape, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    make = {
        "Gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**shape, final_logit_softcapping=0.5)),
        "Cohere": lambda: CohereForCausalLM(CohereConfig(**shape, logit_scale=3.0)),
        "Granite": lambda: GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=0.2)),
    }
    return make[kind]().eval()


def deaf(family: str) -> PreTrainedModel:
    """A model whose attention no keyword argument of a forward reaches: stablelm, nemotron, doge or falcon."""
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": WINDOW}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **special)).eval()
