"""Tiny checkpoints of each family under each rescaling, in both forms of config.json, with their true logits."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rope_patch import patch_model
from rope_patch.rope.older_form import older_form

WINDOW = 512
FACTOR = 4.0
ROWS = {"short": 400, "long": 768}  # tokens: within the native window, and beyond it
HEAD_DIM = 64
VOCABULARY = 320  # another size than any other of the models: ONNX Runtime GenAI finds the head by its shape

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": WINDOW,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,  # so large that attention, and with it every rescaling, shows in the logits
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 100_000.0}
# name of the family -> model type and what its config needs beyond `_COMMON`
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"head_dim": HEAD_DIM}),
    "Mistral": ("mistral", {"head_dim": HEAD_DIM, "sliding_window": None}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": HEAD_DIM}),
    # programs take every sixth layer of Gemma 3 for the one that sees all tokens
    "Gemma3": (
        "gemma3_text",
        {
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": dict(_ROPE),
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "Phi3": ("phi3", {"original_max_position_embeddings": WINDOW, "sliding_window": None}),
}

_LONG = [1 + 3 * j / (HEAD_DIM // 2 - 1) for j in range(HEAD_DIM // 2)]
# label of a row of the table -> method and options; None is the native RoPE
RESCALINGS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "none": None,
    "`ntk`": ("ntk", {"factor": FACTOR}),
    "`abf`": ("abf", {"theta": 2e6, "max_position_embeddings": 2048}),
    "`pi`": ("pi", {"factor": FACTOR}),
    "`yarn`": ("yarn", {"factor": FACTOR}),
    "`yarn`, `attention_factor`": ("yarn", {"factor": FACTOR, "attention_factor": 1.0}),
    "`yarn`, `beta_fast` and `beta_slow`": ("yarn", {"factor": FACTOR, "beta_fast": 16.0, "beta_slow": 2.0}),
    "`yarn`, `mscale` and `mscale_all_dim`": ("yarn", {"factor": FACTOR, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "`yarn`, `truncate=False`": ("yarn", {"factor": FACTOR, "truncate": False}),
    "`llama3`": ("llama3", {"factor": FACTOR}),
    "`longrope`": ("longrope", {"factor": FACTOR, "long_factor": _LONG}),
    "`longrope`, equal factors": ("longrope", {"factor": FACTOR, "long_factor": _LONG, "short_factor": _LONG}),
    "`longrope`, `attention_factor`": (
        "longrope",
        {"factor": FACTOR, "long_factor": _LONG, "attention_factor": 1.0},
    ),
    "`cope`": ("cope", {"n": 28, "max_position_embeddings": 2048}),
    "`dynamic-ntk`": ("dynamic-ntk", {"factor": FACTOR}),
    "`drop-rope`": ("drop-rope", {"max_position_embeddings": 2048}),
}
FORMS = ("as saved", "older keys")


def takes(family: str, rescaling: str) -> bool:
    """Whether Transformers has the rescaling for the family.

    Phi-3 it gives LongRoPE and plain bases alone, and for Gemma 3's layer types it drops `truncate`.
    """
    if family == "Gemma3":
        return "truncate" not in rescaling
    return family != "Phi3" or rescaling.split(",")[0] in ("none", "`ntk`", "`abf`", "`longrope`", "`cope`")


def rows_of(rescaling: str) -> dict[str, int]:
    """The rows of `ROWS` that say something: a model that nobody rescaled is not asked beyond its window."""
    return {row: length for row, length in ROWS.items() if length <= WINDOW or RESCALINGS[rescaling] is not None}


def tiny_model(family: str) -> PreTrainedModel:
    """A random model of `family`, float32."""
    model_type, options = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_COMMON, "rope_parameters": dict(_ROPE), **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if family == "Gemma3":
        _let_full_attention_show(model)
    return model


@torch.no_grad()
def _let_full_attention_show(model: PreTrainedModel) -> None:
    """Sharpen and amplify the one layer of Gemma 3 that a rescaling changes, which five others would hide."""
    layer = model.get_decoder().layers[5]
    layer.self_attn.q_norm.weight += 2
    layer.post_attention_layernorm.weight += 20


def token_ids() -> torch.Tensor:
    """[1, n] int64, n the longest of `ROWS`, without special tokens."""
    return torch.randint(3, VOCABULARY, (1, max(ROWS.values())), generator=torch.Generator().manual_seed(1))


def new_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with `rope_parameters` alone."""
    return {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "rope_local_base_freq")}


def write_checkpoint(folder: Path, family: str, rescaling: str) -> dict[str, Path]:
    """Save a model as this package does, in each form, the older one as `export` writes it; the folder of each."""
    model = tiny_model(family)
    if (method := RESCALINGS[rescaling]) is not None:
        patch_model(model, method[0], **method[1])
    saved = folder / "as saved"
    model.save_pretrained(saved)
    config = json.loads((saved / "config.json").read_text())
    older = folder / "older keys"
    shutil.copytree(saved, older, copy_function=_link)
    new = new_keys(config)
    for where, keys in ((saved, new), (older, {**new, **older_form(model.config)})):
        (where / "config.json").unlink()
        (where / "config.json").write_text(json.dumps(keys, indent=2))
        # llama.cpp's converter counts the tokens here for Gemma
        vocabulary = {str(token): token for token in range(VOCABULARY)}
        (where / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return {"as saved": saved, "older keys": older}


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


@torch.no_grad()
def logits_of(model: PreTrainedModel, rows: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Logits of each row, [tokens, vocabulary] float32."""
    ids = token_ids()
    return {row: model(ids[:, :length], use_cache=False).logits[0].float().numpy() for row, length in rows.items()}


def load(folder: Path) -> PreTrainedModel:
    """The checkpoint as plain Transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
