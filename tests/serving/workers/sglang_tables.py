"""What SGLang's rotary classes give for checkpoints. Run by `programs.run`: sglang_tables.py FOLDER JOBS.json"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stand_in_modules import install, rotated_unit_vectors
from transformers import AutoConfig

sys.path.insert(0, sys.argv[1])
install("sglang")
from sglang.srt.layers.rotary_embedding import base, factory, yarn  # noqa: E402

for module in (base, yarn):
    module.envs.SGLANG_ROPE_CACHE_ALIGN.get.return_value = 128  # SGLang's default


def arguments(config: Any) -> dict[str, tuple[float, dict[str, Any]]]:
    """Base and `rope_scaling` of each layer type, as SGLang's own model files take them from the config."""
    parameters = config.rope_parameters
    if "full_attention" in parameters:  # models/gemma3_causal.py passes the bases on, and nothing else
        return {name: (of_type["rope_theta"], {"rope_type": "default"}) for name, of_type in parameters.items()}
    if config.model_type in ("llama", "mistral", "phi3") and getattr(config, "original_max_position_embeddings", None):
        parameters = {
            **parameters,
            "original_max_position_embeddings": config.original_max_position_embeddings,
        }  # models/llama.py
    return {"": (parameters["rope_theta"], parameters)}


def tables(checkpoint: str, rows: dict[str, int]) -> dict[str, np.ndarray]:
    """Each layer type's table for each row."""
    config = AutoConfig.from_pretrained(checkpoint)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    out = {}
    for layer_type, (rope_theta, scaling) in arguments(config).items():
        rotary = factory.get_rope(
            head_dim,
            rotary_dim=head_dim,
            max_position=config.max_position_embeddings,
            base=rope_theta,
            rope_scaling=scaling,
            dtype=torch.float32,
        )
        for row, length in rows.items():
            if hasattr(rotary, "_ensure_cos_sin_cache_length"):  # as its runner does for a longer context
                rotary._ensure_cos_sin_cache_length(length)
            out[f"{layer_type}|{row}"] = rotated_unit_vectors(rotary, length, head_dim).numpy()
    return out


for job in json.loads(Path(sys.argv[2]).read_text()):
    try:
        np.savez(job["out"], **tables(job["checkpoint"], job["rows"]))
    except Exception as error:  # of any kind: it is the outcome
        Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
