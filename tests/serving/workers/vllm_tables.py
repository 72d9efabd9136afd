"""What vLLM's rotary classes give for checkpoints. Run by `programs.run`: vllm_tables.py FOLDER JOBS.json"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from stand_in_modules import install, rotated_unit_vectors
from transformers import AutoConfig

SERVED_LENGTH = 2048  # --max-model-len

sys.path.insert(0, sys.argv[1])
install("vllm")
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope  # noqa: E402

served = phi3_long_rope_scaled_rope.get_current_vllm_config
served.return_value.model_config.max_model_len = SERVED_LENGTH


def tables(checkpoint: str, rows: dict[str, int]) -> dict[str, np.ndarray]:
    """Each layer type's table for each row, with the arguments of vLLM's own model files."""
    config = AutoConfig.from_pretrained(checkpoint)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    types = parameters if "full_attention" in parameters else {"": parameters}
    return {
        f"{layer_type}|{row}": rotated_unit_vectors(
            rotary_embedding.get_rope(
                head_dim, max_position=config.max_position_embeddings, rope_parameters=of_type, dtype=torch.float32
            ),
            length,
            head_dim,
        ).numpy()
        for layer_type, of_type in types.items()
        for row, length in rows.items()
    }


for job in json.loads(Path(sys.argv[2]).read_text()):
    try:
        np.savez(job["out"], **tables(job["checkpoint"], job["rows"]))
    except Exception as error:  # of any kind: it is the outcome
        Path(job["out"]).with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
