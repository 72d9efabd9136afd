"""Offload the inputs of checkpointed layers to host memory between forward and backward."""

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
    """Layers of the decoder that Transformers can checkpoint, in order."""
    return [module for module in find_decoder(model).modules() if isinstance(module, GradientCheckpointingLayer)]


PIECE = 1 << 26
"""Bytes that are pinned at once: 64 MiB, a hundred times what it takes to start a copy."""


def pinned_bytes(size: int) -> int:
    """Bytes pinned for a tensor of `size` bytes: whole pieces, or for less than one the next power of two."""
    return PIECE * -(-size // PIECE) if size > PIECE else 1 << max(size - 1, 0).bit_length()


class OnHost(saved_tensors_hooks):
    """Keeps tensors saved for backward in host memory, which is pinned for tensors of an accelerator.

    This is PyTorch's `save_on_cpu` in pieces of 64 MiB. PyTorch pins powers of two, so that a row of 2^k + 1 tokens
    takes twice what it needs, and reuses pinned memory only for tensors of the same size. Pieces serve rows of any
    length.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


_OnHost = tuple[torch.device, torch.Size, list[torch.Tensor]]  # device and shape of the tensor, its pieces


def _to_host(tensor: torch.Tensor) -> _OnHost:
    pinned = tensor.device.type != "cpu"
    numbers = PIECE // tensor.element_size()  # in a piece
    pieces = []
    for part in tensor.reshape(-1).split(numbers):
        # the last piece is also pinned whole, unless the tensor is smaller than a piece
        room = part.numel() if tensor.numel() <= numbers else numbers
        piece = torch.empty(room, dtype=tensor.dtype, pin_memory=pinned)[: part.numel()]
        # without waiting: the copy back is queued behind it on the same stream
        pieces.append(piece.copy_(part, non_blocking=pinned))
    return tensor.device, tensor.shape, pieces


def _from_host(offloaded: _OnHost) -> torch.Tensor:
    device, shape, pieces = offloaded
    tensor = torch.empty(shape, dtype=pieces[0].dtype, device=device)
    for part, piece in zip(tensor.view(-1).split(PIECE // tensor.element_size()), pieces, strict=True):
        part.copy_(piece, non_blocking=device.type != "cpu")
    return tensor


@contextmanager
def offloaded_checkpoints(model: nn.Module, n_layers: int) -> Iterator[None]:
    """Keep the saved inputs of the first `n_layers` checkpointed layers in pinned host memory until backward.

    Transformers' own `offload` of activation checkpointing does this to all layers. Here the last layers, which
    backward reaches first, may keep theirs on the device, as host memory is limited too.

    Args:
        model: bare or wrapped, with checkpointing switched on.
        n_layers: of its decoder.
    """

    def offloaded(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # while the layer runs, hooks of the checkpoint lie above these, and save nothing of what is inside
        with OnHost():
            return checkpoint(*args, **kwargs)

    with ExitStack() as stack:
        for layer in checkpointed_layers(model)[:n_layers]:
            if layer.gradient_checkpointing:
                checkpoint = layer._gradient_checkpointing_func
                layer._gradient_checkpointing_func = partial(offloaded, checkpoint)
                stack.callback(setattr, layer, "_gradient_checkpointing_func", checkpoint)
        yield
