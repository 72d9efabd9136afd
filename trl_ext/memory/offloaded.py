"""Inputs of checkpointed layers in the memory of the host between forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from rope_patch.rope.rotary import find_decoder


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """Layers of the decoder that Transformers checkpoints one by one, in order, whether it is switched on or not."""
    return [module for module in find_decoder(model).modules() if isinstance(module, GradientCheckpointingLayer)]


PIECE = 1 << 26
"""Bytes that are pinned at once: 64 MiB, a hundred times what it takes to start a copy."""


def pinned_bytes(size: int) -> int:
    """Bytes that are pinned for a tensor of `size`: whole pieces, or below one the next power of two."""
    return PIECE * -(-size // PIECE) if size > PIECE else 1 << max(size - 1, 0).bit_length()


class OnHost(saved_tensors_hooks):
    """What is saved for backward inside waits in memory of the host, pinned where the tensor is of an accelerator.

    What PyTorch's `save_on_cpu` does, in pieces of 64 MiB. PyTorch pins powers of two, which for a row of 2^k + 1
    tokens is twice what it needs, and keeps what it has pinned for tensors of that size alone: pieces serve rows of any
    length.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


_Held = tuple[torch.device, torch.Size, list[torch.Tensor]]


def _to_host(tensor: torch.Tensor) -> _Held:
    pinned = tensor.device.type != "cpu"
    numbers = PIECE // tensor.element_size()
    pieces = []
    for part in tensor.reshape(-1).split(numbers):
        # also the last one is pinned whole, but for tensors that are smaller
        room = part.numel() if tensor.numel() <= numbers else numbers
        piece = torch.empty(room, dtype=tensor.dtype, pin_memory=pinned)[: part.numel()]
        pieces.append(piece.copy_(part, non_blocking=pinned))
    return tensor.device, tensor.shape, pieces


def _from_host(held: _Held) -> torch.Tensor:
    device, shape, pieces = held
    tensor = torch.empty(shape, dtype=pieces[0].dtype, device=device)
    for part, piece in zip(tensor.view(-1).split(PIECE // tensor.element_size()), pieces, strict=True):
        part.copy_(piece, non_blocking=device.type != "cpu")
    return tensor


@contextmanager
def offloaded_checkpoints(model: nn.Module, n_layers: int) -> Iterator[None]:
    """Hold what the first `n_layers` checkpointed layers keep in pinned memory of the host, until backward.

    What Transformers' own `offload` of activation checkpointing does to all layers. Here the layers that backward comes
    to first may keep theirs on the device, as host memory too has an end.

    Args:
        model: bare or wrapped, with checkpointing switched on.
        n_layers: of its decoder.
    """
    with ExitStack() as stack:
        for layer in checkpointed_layers(model)[:n_layers]:
            if layer.gradient_checkpointing:
                own = layer._gradient_checkpointing_func
                layer._gradient_checkpointing_func = partial(_offloaded, own)
                stack.callback(setattr, layer, "_gradient_checkpointing_func", own)
        yield


def _offloaded(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the checkpointed layer gives, whose positional arguments are saved: hidden states."""
    # the hooks of the checkpoint lie on top of these while the layer runs, which keep nothing of what is inside
    with OnHost():
        return checkpoint(function, *args, **kwargs)
