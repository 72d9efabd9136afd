"""Run feed-forward layers and norms of long rows in tiles of tokens: exact, and without whole inner activations.

A feed-forward layer of Llama 3 8B makes several vectors of 14336 numbers for each token, and a norm three of 4096 in
float32. Neither mixes tokens, so a row can pass through in tiles.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from rope_patch.families.capabilities import is_noisy
from rope_patch.rope.rotary import find_decoder, text_modules

TILE = 4096
"""Tokens that pass through at once: enough to keep a GPU busy, at 128 MiB for each 16-bit copy of 16384 channels."""

_PER_TOKEN = ("MLP", "RMSNorm", "LayerNorm")  # name endings of classes whose outputs depend on one token each


def tiled_modules(model: nn.Module) -> list[nn.Module]:
    """Feed-forward layers, norms and adapted matrices of the decoder, which take one tensor [batch, n, ...].

    Args:
        model: bare or wrapped.
    """
    modules = []
    for _, module in text_modules(find_decoder(model)):
        kind = type(module)
        takes_one_tensor = len(inspect.signature(kind.forward).parameters) == 2  # self and the tensor
        is_per_token = kind.__name__.endswith(_PER_TOKEN) and takes_one_tensor
        # PEFT casts the inputs of an adapted matrix to the adapter's dtype, once for each matrix
        is_adapted = isinstance(getattr(module, "base_layer", None), nn.Linear) and hasattr(module, "active_adapters")
        # hooks of DeepSpeed ZeRO-3 gather weights once for each call of a module
        is_partitioned = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
        if (is_per_token or is_adapted) and not is_partitioned:
            modules.append(module)
    return modules


@contextmanager
def tiled(model: nn.Module, tile: int = TILE) -> Iterator[None]:
    """Run feed-forward layers and norms of a model on `tile` tokens at a time, forward and backward.

    With f such a layer and x_i tiles of its input x, the output is [f(x_1), f(x_2), ...]. Backward runs f(x_i) again,
    one tile after the other, for the gradients of x and of the weights: those of f up to the order of sums. The layer
    keeps x alone. Inside a checkpointed layer of Transformers this costs no additional work, as the recompute of the
    checkpoint ends where x is known.

    Where layers are checkpointed, backward has to run inside the block too. At its end modules get their forward back.

    Args:
        model: bare or wrapped.
        tile: tokens, at least 1.
    """
    with ExitStack() as stack:
        for module in tiled_modules(model):
            if "forward" in vars(module):  # another patch's
                stack.callback(setattr, module, "forward", module.forward)
            else:
                stack.callback(delattr, module, "forward")
            module.forward = _TiledForward(module, module.forward, tile)
        yield


class _TiledForward:
    """Stands in for a module's forward."""

    def __init__(self, module: nn.Module, forward: Any, tile: int) -> None:
        self.module, self.forward, self.tile = module, forward, tile

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The output of the module's own forward, [batch, n, ...]."""
        if args or kwargs or x.ndim < 3 or x.shape[1] <= self.tile:
            output: torch.Tensor = self.forward(x, *args, **kwargs)
            return output
        weights = [p for p in self.module.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (x.requires_grad or weights):
            return _in_tiles(self.forward, x, self.tile)
        # saved before anything runs: a checkpoint's recompute ends when all saved tensors are there again
        anchor = torch.empty(0, device=x.device, requires_grad=True)
        kept: Any = _Keep.apply(anchor, x)
        # a tuple hides it from autograd; holding the tensor keeps its node, and with it x, alive
        tiled_output: torch.Tensor = _Tiled.apply(x, (kept,), self, *weights)
        return tiled_output


def _in_tiles(forward: Any, x: torch.Tensor, tile: int) -> torch.Tensor:
    """[forward(x_1), forward(x_2), ...], written into one tensor, so that no second one of its size is needed."""
    output: torch.Tensor | None = None
    for first in range(0, x.shape[1], tile):
        part = forward(x[:, first : first + tile])
        if output is None:
            output = part.new_empty(*x.shape[:2], *part.shape[2:])
        output[:, first : first + tile] = part
    assert output is not None
    return output


class _Keep(torch.autograd.Function):
    """A node of the graph that only saves a tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on what this node gives")


class _Tiled(torch.autograd.Function):
    """A forward in tiles, which backward computes again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kept: tuple[torch.Tensor], forward: _TiledForward, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.kept, ctx.run, ctx.n_weights = kept, forward, len(weights)
        device = x.device.type
        # without its cache: later forwards have no use for weights that a backward casts
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": False,
        }
        ctx.draws = _Draws(x) if any(is_noisy(module) for module in forward.module.modules()) else None
        return _in_tiles(forward.forward, x, forward.tile)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.kept[0].grad_fn.saved_tensors
        run, needs_x = ctx.run, ctx.needs_input_grad[0]
        weights = [p for p in run.module.parameters() if p.requires_grad]
        assert len(weights) == ctx.n_weights, "weights were frozen or unfrozen between forward and backward"
        grad_x = torch.empty_like(x) if needs_x else None
        sums: list[torch.Tensor | None] = [None] * len(weights)
        with (
            torch.enable_grad(),
            # what a tile saves stays on its device, whatever hooks are in force: its backward follows at once
            saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
            torch.autocast(**ctx.autocast),
            nullcontext() if ctx.draws is None else ctx.draws.again(),
        ):
            for first in range(0, x.shape[1], run.tile):
                tile = slice(first, first + run.tile)
                part = x[:, tile].detach().requires_grad_(needs_x)
                output = run.forward(part)
                inputs = [*([part] if needs_x else []), *weights]
                gradients = list(torch.autograd.grad(output, inputs, grad[:, tile], allow_unused=True))
                if grad_x is not None:
                    grad_x[:, tile] = gradients.pop(0)
                _add(sums, gradients)
        cast = [s if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True)]
        return grad_x, None, None, *cast


def _add(sums: list[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients of a tile in float32 or better: sums in 16 bits would lose the contributions of the last tiles."""
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            exact = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            before = sums[i]
            sums[i] = exact if before is None else before.add_(exact)


class _Draws:
    """The state of the random generators at a forward, so that backward draws the same."""

    def __init__(self, x: torch.Tensor) -> None:
        self.device_type, self.cpu_state = x.device.type, torch.get_rng_state()
        self.devices, self.states = get_device_states(x)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw as the forward did, and restore the generators afterwards."""
        kind = self.device_type if self.devices else "cuda"
        with torch.random.fork_rng(self.devices, device_type=kind):
            torch.set_rng_state(self.cpu_state)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=kind)
            yield
