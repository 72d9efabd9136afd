"""The hooks that carry a view from the call of the decoder to its rotary modules.

All are picklable objects. Only what a rotary module receives changes: `position_ids` stay what the caller made them,
since Transformers reads a jump in them as the border of a packed document and masks across it.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import Cache

from .documents import real_tokens_of
from .layerwise import Embeddings, LayerwiseEmbeddings, attach_layer_hooks, detach_layer_hooks
from .limits import why_no_checkpointing
from .rotary import parameter_names, rope_types
from .state import Batch, BoundView, RopeState, ViewSource, forget_draws
from .trainers import is_generating, require_driver


class DecoderEntry:
    """Forward pre-hook of the decoder: draws the view of this forward."""

    def __init__(self, state: RopeState, decoder: nn.Module) -> None:
        self.state = state
        self.parameters = parameter_names(decoder)

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.state.turns.begin(decoder)
        call = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        cache = call.get("past_key_values")
        training = self.state.in_training(decoder) and not is_generating(cache)
        source = self.state.active(training)
        if training and source is self.state.source:
            require_driver(self.state, decoder)
        position_ids, attention_mask = call.get("position_ids"), call.get("attention_mask")
        axes = 2 if position_ids is None else position_ids.ndim
        if axes != 2 and isinstance(source, ViewSource) and not source.view.perturbs:
            source = None  # which is the same, and reads no documents out of positions of another shape
        if source is None:
            self.state.bound = None
            if not training:
                forget_draws(cache)
            return
        tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if tokens is None:
            return  # the decoder itself raises for this call
        if position_ids is not None and axes != 2:
            raise ValueError(
                "a RoPE view that moves positions needs position_ids of shape [batch, seq_len] or None, got "
                f"{tuple(position_ids.shape)}: of positions with several axes (mRoPE) no view says what they become. "
                "Use view 'standard'; rescalings and distillation at true positions go with it."
            )
        if "Paged" in type(call.get("cache")).__name__:
            raise ValueError(
                "a RoPE view needs to know where documents begin and end, and continuous batching (generate_batch) "
                "hands over pieces of them: use generate, or leave the view."
            )
        if position_ids is None and call.get("cu_seq_lens_q") is not None:
            raise ValueError(
                "cu_seq_lens_q says that rows hold several documents, and a RoPE view begins anew in each: give "
                "position_ids that count from 0 in each document too."
            )
        if self.state.layers_call_rotary and torch.is_grad_enabled() and _is_checkpointing(decoder):
            raise ValueError(why_no_checkpointing(decoder))
        if isinstance(source, ViewSource) and source.view.perturbs and _is_chunk_of_a_prompt(cache):
            raise ValueError(
                "prefill_chunk_size hands over a prompt in pieces, and a RoPE view draws for the whole of it: leave "
                "prefill_chunk_size out."
            )
        if isinstance(source, ViewSource) and source.view.layerwise:
            attach_layer_hooks(decoder, one_pair=self._gives_one_pair())
        self.state.enter(
            Batch(
                rows=tokens.shape[0],
                seq_len=tokens.shape[1],
                device=tokens.device,
                position_ids=position_ids,
                attention_mask=real_tokens_of(attention_mask),
                cached=0 if cache is None else int(cache.get_seq_length()),
                training=training,
                cache=cache,
                ids=call.get("input_ids"),
            )
        )

    def _gives_one_pair(self) -> bool:
        """Whether there is one rotary module, outside of layers, and one schedule in it."""
        schedules = [rotary.attributes.get("rope_type") for rotary in self.state.current.rotary.values()]
        return not self.state.layers_call_rotary and len(schedules) == 1 and not isinstance(schedules[0], dict)


class DecoderExit:
    """Forward hook of the decoder, also called when it raises: ends the view of this forward."""

    def __init__(self, state: RopeState) -> None:
        self.state = state

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            in_graph = decoder.training and torch.compiler.is_compiling()
            cache = None if in_graph else _cache_of(output)
            self.state.leave(finished=output is not None, cache=cache)
        finally:
            if not torch.compiler.is_compiling():
                self.state.turns.end()


class RotaryEntry:
    """Forward pre-hook of a rotary module: gives it the RoPE indices of the view instead of the true positions."""

    def __init__(self, state: RopeState, name: str) -> None:
        self.state = state
        self.name = name
        self.frozen_type: Any = None
        self.by_layer: dict[int, Embeddings] = {}  # for the exit of the same call, as is
        self.frequencies: dict[str, torch.Tensor] = {}  # of the schedule, where the view has others

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.restore(module)  # after a forward that an interrupt threw out, of which no hook is told
        current = self.state.current.rotary[self.name]
        if current.was_rounded_in(module):
            current.write(module)
        bound = self.state.bound
        if bound is None:
            return None
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        x = kwargs["x"] if "x" in kwargs else args[0]
        if any("dynamic" in t or t == "longrope" for t in rope_types(module)):
            # these pick frequencies by the largest index: let them see the true ones, then hold on to the choice
            module.forward(*args, **kwargs)
            rope_type = module.rope_type
            self.frozen_type = rope_type
            module.rope_type = dict.fromkeys(rope_type, "default") if isinstance(rope_type, dict) else "default"
        self.state.applied = True
        if isinstance(bound, BoundView) and bound.view.rescales:
            self.frequencies = {name: getattr(module, name) for name in current.buffers}
            for name, inv_freq in self.frequencies.items():
                module._buffers[name] = bound.view.frequencies(inv_freq, bound.parameters)
        if isinstance(bound, BoundView) and bound.view.layerwise:
            for layers, own in bound.by_layer(module.config.num_hidden_layers):
                embeddings = module.forward(x, own(position_ids).to(x.device))
                self.by_layer.update(dict.fromkeys(layers, embeddings))
                bound = own  # any will do for the call itself, whose output no layer takes
        rope_index = bound(position_ids).to(x.device)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": rope_index}
        return (args[0], rope_index, *args[2:]), kwargs

    def restore(self, module: Any) -> None:
        """Give the module back what it has of its schedule."""
        if self.frozen_type is not None:
            module.rope_type = self.frozen_type
            self.frozen_type = None
        if self.frequencies:
            module._buffers.update(self.frequencies)
            self.frequencies = {}


class RotaryExit:
    """Forward hook of a rotary module, also called when it raises: lets go of what the entry holds."""

    def __init__(self, entry: RotaryEntry) -> None:
        self.entry = entry

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        self.entry.restore(module)
        if not self.entry.by_layer:
            return None
        by_layer, self.entry.by_layer = self.entry.by_layer, {}
        return None if output is None else LayerwiseEmbeddings.of(output, by_layer)


def _let_graphs_see_hooks() -> None:
    """Let graphs of torch.compile notice hooks that come and go, also graphs that are there already.

    By default Dynamo takes it that nobody hooks a module after the first call: a view would then change nothing, and a
    graph that was traced with one would serve other models of the same class.
    """
    import torch._dynamo  # Transformers has imported it

    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()


def attach_hooks(decoder: nn.Module, rotary: dict[str, nn.Module], state: RopeState) -> None:
    """Register the hooks of a model that has none."""
    _let_graphs_see_hooks()
    decoder.register_forward_pre_hook(DecoderEntry(state, decoder), with_kwargs=True)
    decoder.register_forward_hook(DecoderExit(state), always_call=True)
    for name, module in rotary.items():
        entry = RotaryEntry(state, name)
        module.register_forward_pre_hook(entry, with_kwargs=True)
        module.register_forward_hook(RotaryExit(entry), always_call=True)


def detach_hooks(decoder: nn.Module, rotary: dict[str, nn.Module]) -> None:
    """Take them off again. Found by class, as handles do not survive a copy of the model."""
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


def _cache_of(output: Any) -> Any:
    """The KV cache that a decoder returned: a field, or among the values of return_dict=False."""
    if isinstance(output, tuple):
        return next((x for x in output if isinstance(x, Cache)), None)
    return getattr(output, "past_key_values", None)


def _is_chunk_of_a_prompt(cache: Any) -> bool:
    """Whether `generate` fills the cache by chunks, of which nothing but its own call tells."""
    if cache is None or torch.compiler.is_compiling() or cache.get_seq_length():
        return False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(40):  # calls of modules and hooks lie between
        if frame is None:
            return False
        frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "_prefill":
            return getattr(frame.f_locals.get("generation_config"), "prefill_chunk_size", None) is not None
    return False


def _is_checkpointing(decoder: nn.Module) -> bool:
    return decoder.training and any(getattr(m, "gradient_checkpointing", False) for m in decoder.modules())
