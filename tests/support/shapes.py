"""Shapes of models that steps were measured with, without weights."""

import torch
from extension_memory import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from trl_ext.memory.size import ModelSize


def size(shape):
    """Its numbers of weights and features."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]}))
    return ModelSize.of(model)
