"""The hooks that carry a view from the call of the decoder to its rotary modules.

All are picklable objects. They change the input of rotary modules and, with a scale by position, queries (`layerwise`).
`position_ids` of the model stay as they are, because Transformers takes a jump in them for the border of a packed
document and masks attention across it.
"""

import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..base.call_stack import frames
from ..families.capabilities import why_no_checkpointing
from ..layout.documents import real_tokens_of
from ..rope.layerwise import (
    LayerwiseEmbeddings,
    OfLayer,
    attach_layer_hooks,
    detach_layer_hooks,
    hands_embeddings,
    query_hooks,
)
from ..rope.rotary import depends_on_length, parameter_names, rope_types
from ..views.base import TRUE_POSITIONS
from .cache_arguments import cache_of, has_paged_cache, returned_cache, tokens_in
from .cached_draws import forget_draws
from .drawn_view import Batch, DrawnView, ForwardIndex
from .query_scale import query_scale
from .recording import logs_of
from .sources import ViewSource
from .state import RopeState
from .trainers import is_generating
from .training_step import learn_step


class DecoderEntry:
    """Forward pre-hook of the decoder: draws the view of this forward."""

    def __init__(self, state: RopeState, decoder: nn.Module, patch: Callable[..., Any]) -> None:
        self.state = state
        self.decoder = weakref.ref(decoder)
        self.patch = patch  # `patch_model`, for a trainer's reference model; it imports this module
        self.parameters = parameter_names(decoder)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "decoder": self.decoder()}  # a copy of the model has its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, decoder=weakref.ref(state["decoder"]))

    def __call__(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._draw(decoder, args, kwargs)
        shard = self.state.shard
        return None if shard is None else (args, shard.without_padding_mask(kwargs))

    def _draw(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Dynamo cannot trace a lock, so compiled forwards of several threads are not kept apart
        if not torch.compiler.is_compiling():
            self.state.lock.acquire(decoder)
        # families and callers differ in which arguments they pass by position
        call = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        cache = cache_of(call)
        in_training = self.state.in_training(decoder)
        training = in_training and not is_generating(cache)
        source = self.state.active(training)
        # a `rope_view` block counts its own draws; the view of the model learns its step from the trainer or optimizer
        if source is None or source is self.state.source:
            # also when `generate` samples replies: the reference model needs the view before it reads them
            forward = (in_training, training, call.get("input_ids") is not None)
            if not (torch.compiler.is_compiling() and self._step_is_known(*forward)):
                self._learn_step(*forward)
        if source is None:
            source = self.state.source_without_view()
        position_ids, attention_mask = call.get("position_ids"), call.get("attention_mask")
        axes = 2 if position_ids is None else position_ids.ndim
        if position_ids is not None and axes != 2 and self.state.current.query_scale is not None:
            raise ValueError(
                "a scale of queries by position needs position_ids of shape [batch, seq_len] or None, got "
                f"{tuple(position_ids.shape)}: several axes (mRoPE) are no one position. Call unpatch_model first."
            )
        stays = isinstance(source, ViewSource) and not (source.view.perturbs or source.view.scales_queries)
        if axes != 2 and stays:
            source = None  # the same result, without looking for documents in mRoPE positions
        if source is None:
            self.state.drawn, self.state.scales = None, False
            if not training:
                forget_draws(cache)
            return
        tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if tokens is None:
            return  # the decoder itself raises for this call
        if position_ids is not None and axes != 2:
            raise ValueError(
                "a RoPE view that moves positions needs position_ids of shape [batch, seq_len] or None, got "
                f"{tuple(position_ids.shape)}: views are not defined for positions with several axes (mRoPE). "
                f"Use view {TRUE_POSITIONS!r}; rescalings and distillation at true positions go with it."
            )
        if has_paged_cache(call):
            raise ValueError(
                "a RoPE view or a scale of queries needs whole documents, and continuous batching (generate_batch) "
                "passes pieces of them: use generate, or leave the view or the scale."
            )
        if position_ids is None and call.get("cu_seq_lens_q") is not None:
            raise ValueError(
                "cu_seq_lens_q means that documents are packed, and a RoPE view or a scale of queries has to know "
                "their borders: also pass position_ids that count from 0 in each document."
            )
        if self.state.layers_call_rotary and torch.is_grad_enabled() and is_checkpointing(decoder):
            raise ValueError(why_no_checkpointing(decoder))
        moves = isinstance(source, ViewSource) and (source.view.perturbs or self.state.current.query_scale is not None)
        if moves and _is_chunk_of_a_prompt(cache):
            raise ValueError(
                "prefill_chunk_size passes a prompt in pieces, and a RoPE view, or a scale of queries by position, "
                "reads the whole prompt: leave prefill_chunk_size out."
            )
        if isinstance(source, ViewSource) and source.view.layerwise:
            attach_layer_hooks(decoder)
        ids = call.get("input_ids")
        if self.state.shard is not None:  # draws are made for whole sequences
            whole = self.state.shard.batch
            tokens = ids = whole["input_ids"]
            position_ids, attention_mask = whole.get("position_ids"), whole.get("attention_mask")
        cached = tokens_in(cache)
        self.state.enter(
            Batch(
                rows=tokens.shape[0],
                seq_len=tokens.shape[1],
                device=tokens.device,
                position_ids=position_ids,
                attention_mask=real_tokens_of(attention_mask, cached),
                cached=cached,
                training=training,
                cache=cache,
                ids=ids,
                compresses=self.state.layers_call_rotary,
                logs=logs_of(decoder),
            ),
            source,
        )

    @torch.compiler.disable
    def _learn_step(self, training: bool, draws: bool, has_ids: bool) -> None:
        decoder = self.decoder()
        assert decoder is not None
        learn_step(self.state, decoder, self.patch, training=training, draws=draws, has_ids=has_ids)

    @torch.compiler.assume_constant_result  # before torch 2.13 its arguments must be constants, not modules
    def _step_is_known(self, training: bool, draws: bool, has_ids: bool) -> bool:
        """Whether `learn_step` succeeds; Dynamo calls this while it traces, inside the trainer's step.

        If it does not, the graph breaks, and the error is raised outside of the graph, where users can read it.
        """
        try:
            self._learn_step(training, draws, has_ids)
        except ValueError:
            return False
        return True


class DecoderExit:
    """Forward hook of the decoder, also called if the forward raises: ends the view of this forward."""

    def __init__(self, state: RopeState) -> None:
        self.state = state

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            in_graph = decoder.training and torch.compiler.is_compiling()
            cache = None if in_graph else returned_cache(output)
            self.state.leave(finished=output is not None, cache=cache)
            if output is not None and self.state.scales:
                _require_scaled(decoder)
        finally:
            if not torch.compiler.is_compiling():
                self.state.lock.release()


class RotaryEntry:
    """Forward pre-hook of a rotary module: gives it the RoPE indices of the view instead of the true positions."""

    def __init__(self, state: RopeState, name: str) -> None:
        self.state = state
        self.name = name
        self.frozen_type: Any = None  # the module's rope_type, while `_freeze` replaces it
        self.by_layer: dict[int, OfLayer] = {}  # read by the exit of the same call
        self.query_scale: torch.Tensor | None = None  # of the other layers, and read there too
        self.frequencies: dict[str, torch.Tensor] = {}  # the module's own, while a view replaces them

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.restore(module)  # an interrupted forward runs no exit hook
        current = self.state.current.rotary[self.name]
        # `model.to(bfloat16)` casts buffers too: with 8 bits of frequency, far positions are wrong by whole radians.
        # A later `.float()` does not restore the values, and the dtype no longer shows the cast.
        # https://github.com/huggingface/transformers/issues/25681
        if current.was_rounded_in(module) or current.was_replaced_in(module):
            current.write(module)
        drawn = self.state.drawn
        self.by_layer, self.query_scale = {}, None
        picks = any(depends_on_length(t) for t in rope_types(module))
        if picks and self.state.shard is not None:
            self._choose_by_whole_rows(module, args, kwargs)
        # None in families that call the module once for all layers
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        if drawn is None or layer_type in self.state.local.types:
            return None
        view = drawn.view if isinstance(drawn, DrawnView) else None
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        x = kwargs["x"] if "x" in kwargs else args[0]
        stays = self.state.local.layers if view is None or (view.perturbs and not view.names_layers) else ()
        # `forward`, because calling the module would run this hook again
        at_true_positions: Any = module.forward(*args, **kwargs) if stays or picks else None
        if picks:
            # dynamic RoPE chooses frequencies by max(position_ids); it has seen the true ones, so freeze that choice
            self._freeze(module)
        self.state.applied = True
        if isinstance(drawn, DrawnView) and drawn.view.rescales:
            self.frequencies = {name: getattr(module, name) for name in current.buffers}
            for name, inv_freq in self.frequencies.items():
                module._buffers[name] = drawn.view.frequencies(inv_freq, drawn.parameters)
        if isinstance(drawn, DrawnView) and drawn.view.layerwise:
            for layers, layer_drawn in drawn.by_layer(module.config.num_hidden_layers):
                embeddings = module.forward(x, self._index(layer_drawn, position_ids).to(x.device))
                self.by_layer.update(dict.fromkeys(layers, (embeddings, self._scale(layer_drawn, position_ids))))
                drawn = layer_drawn  # any group will do for the call itself: no layer uses its output
        self.by_layer.update(dict.fromkeys(stays, (at_true_positions, None)))
        self.query_scale = self._scale(drawn, position_ids)
        rope_index = self._index(drawn, position_ids).to(x.device)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": rope_index}
        return (args[0], rope_index, *args[2:]), kwargs

    def _index(self, drawn: ForwardIndex, position_ids: torch.Tensor) -> torch.Tensor:
        """RoPE indices of this rank's tokens."""
        shard = self.state.shard
        return drawn(position_ids) if shard is None else shard.local(drawn(shard.positions))

    def _scale(self, drawn: ForwardIndex, position_ids: torch.Tensor) -> torch.Tensor | None:
        """Factors of the queries of this rank's tokens."""
        shard = self.state.shard
        scale = query_scale(self.state.current, drawn, position_ids if shard is None else shard.positions)
        self.state.scales = scale is not None
        return scale if shard is None or scale is None else shard.local(scale)

    def _choose_by_whole_rows(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let dynamic RoPE choose frequencies by whole sequences, so that ranks which share one have the same."""
        assert self.state.shard is not None
        positions = self.state.shard.positions
        if "position_ids" in kwargs:
            module.forward(*args, **{**kwargs, "position_ids": positions})
        else:
            module.forward(args[0], positions, *args[2:], **kwargs)
        self._freeze(module)

    def _freeze(self, module: Any) -> None:
        """Keep the frequencies that the module has chosen, until `restore`."""
        if self.frozen_type is None:
            self.frozen_type = rope_type = module.rope_type
            module.rope_type = dict.fromkeys(rope_type, "default") if isinstance(rope_type, dict) else "default"

    def restore(self, module: Any) -> None:
        """Give the module its own RoPE type and frequencies back."""
        if self.frozen_type is not None:
            module.rope_type = self.frozen_type
            self.frozen_type = None
        if self.frequencies:
            module._buffers.update(self.frequencies)
            self.frequencies = {}


class RotaryExit:
    """Forward hook of a rotary module, also called if it raises: undoes what the entry changed."""

    def __init__(self, entry: RotaryEntry) -> None:
        self.entry = entry

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        self.entry.restore(module)
        by_layer, query_scale = self.entry.by_layer, self.entry.query_scale
        self.entry.by_layer, self.entry.query_scale = {}, None
        if output is None or (not by_layer and query_scale is None):
            return None
        return LayerwiseEmbeddings.of(output, by_layer, query_scale)


def _require_scaled(decoder: nn.Module) -> None:
    """Raise RuntimeError if no layer of a forward has used the scale of its queries."""
    queries = query_hooks(decoder)
    is_used = any(query.applied for query in queries)
    for query in queries:
        query.applied = False
    if not is_used:
        raise RuntimeError(
            "the scale of queries by position had no effect, because attention did not call the modules that gave "
            "queries when the model was patched. Load the model anew and patch it, without code that replaces the "
            "forward of attention."
        )


def attach_hooks(decoder: nn.Module, rotary: dict[str, nn.Module], state: RopeState, patch: Callable[..., Any]) -> None:
    """Register the hooks of a model that has none; `patch` is `patch_model`."""
    import torch._dynamo  # Transformers has imported it

    # By default Dynamo assumes that no hook is added after the first call. A view would then have no effect, and a
    # graph that was traced with a view would serve other models of the same class. The reset drops existing graphs.
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()
    decoder.register_forward_pre_hook(DecoderEntry(state, decoder, patch), with_kwargs=True)
    # always_call: if a forward raises, its view must end too, or the next forward would run under it
    decoder.register_forward_hook(DecoderExit(state), always_call=True)
    for name, module in rotary.items():
        entry = RotaryEntry(state, name)
        module.register_forward_pre_hook(entry, with_kwargs=True)
        module.register_forward_hook(RotaryExit(entry), always_call=True)
    if state.local.layers and hands_embeddings(decoder):
        attach_layer_hooks(decoder)


def detach_hooks(decoder: nn.Module, rotary: dict[str, nn.Module], *, layers: bool = True) -> None:
    """Remove the hooks, with `layers` also those of layers; by class, as a copy of a model has other handles."""
    if layers:
        detach_layer_hooks(decoder)
    ours = (DecoderEntry, DecoderExit, RotaryEntry, RotaryExit)
    for module in (decoder, *rotary.values()):
        for hooks, companions in (
            (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
            (module._forward_hooks, [module._forward_hooks_always_called, module._forward_hooks_with_kwargs]),
        ):
            for handle in [h for h, hook in hooks.items() if isinstance(hook, ours)]:
                del hooks[handle]
                for companion in companions:
                    companion.pop(handle, None)


def _is_chunk_of_a_prompt(cache: Any) -> bool:
    """Whether `generate` fills the cache in chunks, which only its frame on the stack shows."""
    if cache is None or torch.compiler.is_compiling() or tokens_in(cache):
        return False
    for frame in islice(frames(), 41):  # calls of modules and hooks lie between
        if frame.f_code.co_name == "_prefill":
            return getattr(frame.f_locals.get("generation_config"), "prefill_chunk_size", None) is not None
    return False


def is_checkpointing(decoder: nn.Module) -> bool:
    """Whether layers run again in backward."""
    return decoder.training and any(getattr(m, "gradient_checkpointing", False) for m in decoder.modules())
