"""Different positions for some layers, and scales of queries, passed as an argument: recomputed layers get them too."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Embeddings = tuple[torch.Tensor, torch.Tensor]

OfLayer = tuple[Embeddings, torch.Tensor | None]
"""What a layer gets: its embeddings, and the factor of each query, [1 or batch, n], or None."""


class LayerwiseEmbeddings(tuple[torch.Tensor, torch.Tensor]):
    """(cos, sin) of a rotary module, with other embeddings for some layers, which their hooks pick.

    Models expect a tuple; a subclass, because wrappers rebuild plain tuples.
    """

    by_layer: dict[int, OfLayer]
    others: OfLayer

    @classmethod
    def of(
        cls, output: Embeddings, by_layer: dict[int, OfLayer], query_scale: torch.Tensor | None
    ) -> "LayerwiseEmbeddings":
        """`by_layer` for the layers in it, `output` and `query_scale` for the others."""
        made = cls(output if isinstance(output, tuple) else (output,))  # one complex tensor in Llama 4
        made.by_layer, made.others = by_layer, (output, query_scale)
        return made


@dataclass(frozen=True)
class QueryPlace:
    """The module that gives the queries of a layer's attention, as the last before they are rotated or compared.

    Args:
        attention: name of the attention below the layer.
        module: name of the module below the attention.
        by_head: whether it gives [batch, n_heads, n, head_dim] rather than [batch, n, n_heads, head_dim].
        fused: (width, period) if it gives keys and values too: feature i is a query's if i % period < width.
    """

    attention: str
    module: str
    by_head: bool = False
    fused: tuple[int, int] | None = None


class QueryScale:
    """Forward hook of the module that gives queries: multiplies them by the scale of their positions."""

    def __init__(self, place: QueryPlace) -> None:
        self.place = place
        self.scale: torch.Tensor | None = None  # [1 or batch, n], from the attention's call until the module's
        self.applied = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        scale, self.scale = self.scale, None  # Llama 4 norms keys by the same module, after the queries
        if scale is None:
            return None
        self.applied = True
        factor = scale.to(output)[..., None]  # [1 or batch, n, 1]
        if self.place.fused is not None:
            width, period = self.place.fused
            is_query = torch.arange(output.shape[-1], device=output.device) % period < width
            factor = torch.where(is_query, factor, 1.0)
        if output.ndim == 4:
            by_head = self.place.by_head or output.shape[1] != scale.shape[-1]
            factor = factor.unsqueeze(1 if by_head else 2)
        return output * factor


class AttentionEntry:
    """Forward pre-hook of an attention: hands the scale in its embeddings to the module that gives queries.

    It is inside of checkpointed layers, so that it runs again where they do.
    """

    def __init__(self, query: QueryScale) -> None:
        self.query = query

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments | None":
        embeddings = _layerwise_among(args, kwargs)
        if embeddings is None:
            return None
        of_layer, self.query.scale = embeddings.others
        module = attention.get_submodule(self.query.place.module)
        if not any(hook is self.query for hook in module._forward_hooks.values()):
            _remove_queries(attention)  # an adapter was put around the module since, or taken off
            module.register_forward_hook(self.query)
        return _replaced(args, kwargs, embeddings, of_layer)


class LayerEntry:
    """Forward pre-hook of a layer that picks its own from `LayerwiseEmbeddings`."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.queries: list[QueryScale] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments | None":
        embeddings = _layerwise_among(args, kwargs)
        if embeddings is None:
            return None
        of_layer, query_scale = embeddings.by_layer.get(self.layer, embeddings.others)
        own = LayerwiseEmbeddings.of(of_layer, {}, query_scale) if self.queries else of_layer
        return _replaced(args, kwargs, embeddings, own)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _layerwise_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerwiseEmbeddings | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, LayerwiseEmbeddings)), None)


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], old: Any, new: Any) -> Arguments:
    return tuple(new if x is old else x for x in args), {n: new if x is old else x for n, x in kwargs.items()}


def hands_embeddings(decoder: Any) -> bool:
    """Whether each layer gets the output of the rotary module as an argument."""
    layers = getattr(decoder, "layers", None)
    # of a wrapped layer, only the inner module has the argument
    return isinstance(layers, nn.ModuleList) and all(
        any("position_embeddings" in inspect.signature(type(m).forward).parameters for m in layer.modules())
        for layer in layers
    )


def attach_layer_hooks(decoder: Any, places: Mapping[int, list[QueryPlace]] | None = None) -> None:
    """Register the hooks once, in a decoder that `hands_embeddings`; with `places`, those of queries too."""
    for number, layer in enumerate(decoder.layers):
        entry = _entry(layer)
        if entry is None:
            entry = LayerEntry(number)
            layer.register_forward_pre_hook(entry, with_kwargs=True)
        if places and not entry.queries:
            entry.queries = [QueryScale(place) for place in places.get(number, ())]
            for query in entry.queries:
                attention = layer.get_submodule(query.place.attention)
                attention.register_forward_pre_hook(AttentionEntry(query), with_kwargs=True)
                attention.get_submodule(query.place.module).register_forward_hook(query)


def query_hooks(decoder: Any) -> list[QueryScale]:
    """The hooks of all queries."""
    return [query for layer in decoder.layers for query in getattr(_entry(layer), "queries", ())]


def detach_layer_hooks(decoder: Any) -> None:
    """Remove the hooks of the layers."""
    for layer in getattr(decoder, "layers", ()):
        has_queries = bool(getattr(_entry(layer), "queries", ()))
        for module in layer.modules() if has_queries else (layer,):
            for handle in [
                h for h, hook in module._forward_pre_hooks.items() if isinstance(hook, LayerEntry | AttentionEntry)
            ]:
                del module._forward_pre_hooks[handle]
                module._forward_pre_hooks_with_kwargs.pop(handle, None)
        if has_queries:
            _remove_queries(layer)


def _entry(layer: nn.Module) -> LayerEntry | None:
    return next((hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, LayerEntry)), None)


def _remove_queries(around: nn.Module) -> None:
    for module in around.modules():
        for handle in [h for h, hook in module._forward_hooks.items() if isinstance(hook, QueryScale)]:
            del module._forward_hooks[handle]
