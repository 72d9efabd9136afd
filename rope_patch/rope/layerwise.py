"""Different positions for some layers, passed as an argument so that recomputed layers get them too."""

import inspect
from typing import Any

import torch
from torch import nn

Embeddings = tuple[torch.Tensor, torch.Tensor]


class LayerwiseEmbeddings(tuple[torch.Tensor, torch.Tensor]):
    """(cos, sin) of a rotary module, with other embeddings for some layers, which their hooks pick.

    Models expect a tuple; a subclass, because wrappers rebuild plain tuples.
    """

    by_layer: dict[int, Embeddings]
    others: Embeddings

    @classmethod
    def of(cls, output: Embeddings, by_layer: dict[int, Embeddings]) -> "LayerwiseEmbeddings":
        """`by_layer` for the layers in it, `output` for the others."""
        made = cls(output if isinstance(output, tuple) else (output,))  # one complex tensor in Llama 4
        made.by_layer, made.others = by_layer, output
        return made


class LayerEntry:
    """Forward pre-hook of a layer that picks its embeddings from `LayerwiseEmbeddings`."""

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
    """Whether each layer gets the output of the rotary module as an argument."""
    layers = getattr(decoder, "layers", None)
    # of a wrapped layer, only the inner module has the argument
    return isinstance(layers, nn.ModuleList) and all(
        any("position_embeddings" in inspect.signature(type(m).forward).parameters for m in layer.modules())
        for layer in layers
    )


def attach_layer_hooks(decoder: Any) -> None:
    """Register the hooks once, in a decoder that `hands_embeddings`."""
    for number, layer in enumerate(decoder.layers):
        if not any(isinstance(hook, LayerEntry) for hook in layer._forward_pre_hooks.values()):
            layer.register_forward_pre_hook(LayerEntry(number), with_kwargs=True)


def detach_layer_hooks(decoder: Any) -> None:
    """Remove the hooks of the layers."""
    for layer in getattr(decoder, "layers", ()):
        for handle in [h for h, hook in layer._forward_pre_hooks.items() if isinstance(hook, LayerEntry)]:
            del layer._forward_pre_hooks[handle]
            layer._forward_pre_hooks_with_kwargs.pop(handle, None)
