"""Positions of their own for some layers, handed to them as an argument: a checkpoint's recompute has them too."""

import inspect
from typing import Any

import torch
from torch import nn

Embeddings = tuple[torch.Tensor, torch.Tensor]


class LayerwiseEmbeddings(tuple[torch.Tensor, torch.Tensor]):
    """(cos, sin) as a rotary module gives them, with those of each layer; the hooks of the layers take their own.

    A tuple, since that is what models pass on; a subclass, since wrappers rebuild plain tuples.
    """

    by_layer: dict[int, Embeddings]

    @classmethod
    def of(cls, output: Embeddings, by_layer: dict[int, Embeddings]) -> "LayerwiseEmbeddings":
        """`output` with the embeddings of all layers beside it."""
        made = cls(output)
        made.by_layer = by_layer
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
        return args, {**kwargs, "position_embeddings": embeddings.by_layer[self.layer]}


def attach_layer_hooks(decoder: Any, *, one_pair: bool) -> None:
    """Register the hooks, once.

    Args:
        decoder: of the model.
        one_pair: whether its rotary modules make one pair of cosines and sines a forward.

    Raises:
        ValueError: layers of this family do not get (cos, sin) as an argument, or there are several kinds of them.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not one_pair or not all(_takes_embeddings(x) for x in layers):
        raise ValueError(
            f"{type(decoder).__name__} does not hand one pair of cosines and sines to each of its layers, which a view "
            "with positions of their own in some layers needs: leave out `layers`."
        )
    for number, layer in enumerate(layers):
        if not any(isinstance(hook, LayerEntry) for hook in layer._forward_pre_hooks.values()):
            layer.register_forward_pre_hook(LayerEntry(number), with_kwargs=True)


def detach_layer_hooks(decoder: Any) -> None:
    """Take them off again."""
    for layer in getattr(decoder, "layers", ()):
        for handle in [h for h, hook in layer._forward_pre_hooks.items() if isinstance(hook, LayerEntry)]:
            del layer._forward_pre_hooks[handle]
            layer._forward_pre_hooks_with_kwargs.pop(handle, None)


def _takes_embeddings(layer: nn.Module) -> bool:
    return "position_embeddings" in inspect.signature(type(layer).forward).parameters
