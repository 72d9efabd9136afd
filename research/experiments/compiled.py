"""Training of small models at the speed of a GPU, not of its launches: norms and MLPs compiled while a run trains."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rope_patch.rope.rotary import find_decoder


@contextmanager
def compiled_tokenwise(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Inside, the norms and MLPs of all layers are compiled for any number of tokens.

    They fuse with the casts of autocast, which for a hidden size of 576 take longer than the products. Attention and
    what surrounds layers stay as they are, hooks included: views and distillation see the same calls. One graph serves
    all layers.

    Args:
        model: bare or wrapped.
        on: False compiles nothing.
    """
    parts = [
        part
        for layer in (find_decoder(model).layers if on else ())
        for part in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp)
    ]
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=True)
    try:
        yield
    finally:
        for part in parts:
            del part.forward
