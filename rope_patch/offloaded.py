"""Inputs of checkpointed layers in the memory of the host between forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers.modeling_layers import GradientCheckpointingLayer

from .rotary import find_decoder


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """Layers of the decoder that Transformers checkpoints one by one, in order, whether it is switched on or not."""
    return [module for module in find_decoder(model).modules() if isinstance(module, GradientCheckpointingLayer)]


class HostRoom:
    """How much of the host's memory PyTorch may keep pinned for checkpoints of several lengths of rows.

    PyTorch pins powers of two and keeps what it has pinned, for tensors of that size alone.

    Args:
        size: bytes that may be pinned at a time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pinned: dict[int, int] = {}

    def make(self, tensor: torch.Tensor, times: int) -> None:
        """Let go of what other sizes have pinned where so many copies of a tensor do not fit beside it."""
        block = pinned_bytes(tensor.numel() * tensor.element_size())
        if block in self._pinned:
            return
        if sum(self._pinned.values()) + times * block > self.size:
            torch.cuda.synchronize()  # blocks that copies still read stay
            torch._C._host_emptyCache()
            self._pinned.clear()
        self._pinned[block] = times * block


def pinned_bytes(size: int) -> int:
    """Bytes that PyTorch pins for a tensor of `size`: the next power of two."""
    return 1 << max(size - 1, 0).bit_length()


@contextmanager
def offloaded_checkpoints(model: nn.Module, n_layers: int, room: HostRoom | None = None) -> Iterator[None]:
    """Hold what the first `n_layers` checkpointed layers keep in pinned memory of the host, until backward.

    What Transformers' own `offload` of activation checkpointing does to all layers, by PyTorch's `save_on_cpu`. Here
    the layers that backward comes to first may keep theirs on the device, as host memory too has an end.

    Args:
        model: bare or wrapped, with checkpointing switched on.
        n_layers: of its decoder.
        room: on the host; None where nothing is pinned, or all rows are as long.
    """
    with ExitStack() as stack:
        for layer in checkpointed_layers(model)[:n_layers]:
            if layer.gradient_checkpointing:
                own = layer._gradient_checkpointing_func
                layer._gradient_checkpointing_func = _Offloaded(own, n_layers, room)
                stack.callback(setattr, layer, "_gradient_checkpointing_func", own)
        yield


class _Offloaded:
    """A checkpointing function whose saved inputs go to the host."""

    def __init__(self, checkpoint: Callable[..., Any], n_layers: int, room: HostRoom | None) -> None:
        self.checkpoint, self.n_layers, self.room = checkpoint, n_layers, room

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the checkpointed layer gives, whose positional arguments are saved: hidden states."""
        states = next((x for x in args if isinstance(x, torch.Tensor)), None)
        if states is None:
            return self.checkpoint(function, *args, **kwargs)
        if self.room is not None:
            self.room.make(states, self.n_layers)
        device = states.device.type
        # the hooks of the checkpoint lie on top of these while the layer runs, which keep nothing of what is inside
        with save_on_cpu(pin_memory=device != "cpu", device_type=device):
            return self.checkpoint(function, *args, **kwargs)
