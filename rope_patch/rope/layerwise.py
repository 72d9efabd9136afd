"""Positions of their own for some layers, handed to them as an argument: a checkpoint's recompute has them too."""

import inspect
from typing import Any

import torch
from torch import nn

Embeddings = tuple[torch.Tensor, torch.Tensor]


class LayerwiseEmbeddings(tuple[torch.Tensor, torch.Tensor]):
    """(cos, sin) as a rotary module gives them, with those of some layers; the hooks of the layers take their own.

    A tuple, since that is what models pass on; a subclass, since wrappers rebuild plain tuples.
    """

    by_layer: dict[int, Embeddings]
    others: Embeddings

    @classmethod
    def of(cls, output: Embeddings, by_layer: dict[int, Embeddings]) -> "LayerwiseEmbeddings":
        """`output`, for layers that are not in `by_layer`, with the embeddings of those that are beside it."""
        made = cls(output if isinstance(output, tuple) else (output,))  # one complex tensor in Llama 4
        made.by_layer, made.others = by_layer, output
        return made


class LayerEntry:
    """Forward pre-hook of a layer: takes its own embeddings out of those of all."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        embeddings = kwargs.get("position_embeddings")
        if not isinstance(embeddings, LayerwiseEmbeddings):
            return None
        of_layer = embeddings.by_layer.get(self.layer, embeddings.others)
        return args, {**kwargs, "position_embeddings": of_layer}


def hands_embeddings(decoder: Any) -> bool:
    """Whether each layer gets what the rotary module gives as an argument."""
    layers = getattr(decoder, "layers", None)
    return isinstance(layers, nn.ModuleList) and all(_takes_embeddings(layer) for layer in layers)


def attach_layer_hooks(decoder: Any) -> None:
    """Register the hooks, once, in a decoder that `hands_embeddings`."""
    for number, layer in enumerate(decoder.layers):
        if not any(isinstance(hook, LayerEntry) for hook in layer._forward_pre_hooks.values()):
            layer.register_forward_pre_hook(LayerEntry(number), with_kwargs=True)


def detach_layer_hooks(decoder: Any) -> None:
    """Take them off again."""
    for layer in getattr(decoder, "layers", ()):
        for handle in [h for h, hook in layer._forward_pre_hooks.items() if isinstance(hook, LayerEntry)]:
            del layer._forward_pre_hooks[handle]
            layer._forward_pre_hooks_with_kwargs.pop(handle, None)


def _takes_embeddings(layer: nn.Module) -> bool:
    # a wrapper has a signature of its own, and the layer inside it
    return any("position_embeddings" in inspect.signature(type(m).forward).parameters for m in layer.modules())
