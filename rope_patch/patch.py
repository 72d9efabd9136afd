"""The public calls: patch and unpatch a model, and apply a view or the native RoPE inside a block."""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .adapters.watch import forget_adapters, require_no_decoder_in_adapters, watch_adapters
from .families.capabilities import why_fixed_frequencies, why_no_layers_apart, why_no_native_rope, why_no_views
from .families.local_layers import LocalLayers
from .families.queries import RECORD, query_places, records_query_scale, why_no_query_scale
from .forward.config_checks import require_frequencies_of_config, require_one_config, require_saved_rope, text_config
from .forward.hooks import attach_hooks, detach_hooks, is_checkpointing
from .forward.sources import TableSource, ViewSource
from .forward.state import STATE_ATTRIBUTE, RopeState, When, inside_native_rope, state_of
from .methods import resolve_method, resolve_view
from .rescalings import Rescaling
from .rescalings.in_place import RopeParameters, names_no_window, own_config, rescaled, restored_to_float32
from .rope.layerwise import attach_layer_hooks
from .rope.rotary import (
    configs_of_forwards,
    find_causal_lm,
    find_decoder,
    is_dynamic,
    is_longrope,
    layers_call_rotary,
    named_rotary_modules,
    rope_types,
    rotary_by_name,
)
from .views import View
from .views.base import MAX_INDEX

M = TypeVar("M", bound=nn.Module)

logger = logging.get_logger(__name__)

# open native_rope blocks on a decoder without patches, which has no RopeState to count them in
_NATIVE_WITHOUT_PATCH: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()

# serialises attach and detach: one thread's last block must not remove hooks that another's first block relies on
_BLOCKS = threading.RLock()


def patch_model(model: M, method: str | View | Rescaling, *, seed: int = 0, when: When = "train", **options: Any) -> M:
    """Patch a loaded model in place: rescale its RoPE frequencies, or sample a view of its RoPE indices.

    A rescaling (RoPE scaling) takes effect at once. It is written into the model's own copy of the config, so
    `save_pretrained` writes a plain checkpoint that gives the same logits without this package. A second rescaling
    replaces the first: both start from the RoPE that the model came with or, after `load_adapter`, from the RoPE that
    the adapter was trained with. A view is drawn anew in every training forward and is not saved; a second view
    replaces the first. A model can have a rescaling and a view.

    Args:
        model: any Transformers causal LM with RoPE, in any dtype or quantised, bare or wrapped by PEFT.
        method: a name from `list_methods()`, or an instance such as `Skip(skip=Uniform(1, 4096))`.
        seed: of a view's draws, which depend on (seed, step, sample) alone.
        when: "train" samples a view only while the model is in training mode, "always" in every forward.
        **options: arguments of the method, if it is given by name.

    Returns:
        The same object.

    Raises:
        ValueError: unknown method or option, an option out of its range, or a model that cannot be patched this way.
            The model is unchanged.
    """
    if isinstance(method, nn.Module) and not isinstance(model, nn.Module):
        raise ValueError(
            f"model and method are swapped: the model comes first, as in patch_model(model, {model!r}); got a "
            f"{type(method).__name__} as method."
        )
    chosen = checked_method(method, options, seed=seed, when=when)
    decoder = find_decoder(model)
    if _NATIVE_WITHOUT_PATCH.get(decoder):
        raise ValueError(inside_native_rope("patch_model"))
    with _normal_tensors():
        return _patched(model, decoder, chosen, seed, when)


def checked_method(
    method: str | View | Rescaling, options: dict[str, Any], *, seed: int, when: When
) -> View | Rescaling:
    """The view or rescaling that these arguments of `patch_model` name; ValueError if they do not go together."""
    chosen = resolve_method(method, options)
    if when not in get_args(When):
        raise ValueError(f"when must be one of {get_args(When)}, got {when!r}.")
    if isinstance(chosen, Rescaling) and (seed, when) != (0, "train"):
        raise ValueError(
            f"seed and when are arguments of views; rescaling {chosen.name!r} takes neither: leave them out."
        )
    return chosen


def _patched(model: M, decoder: PreTrainedModel, chosen: View | Rescaling, seed: int, when: When) -> M:
    state = state_of(decoder) or _new_state(decoder)
    state.require_no_native_rope("patch_model")
    causal_lm = find_causal_lm(model)
    if isinstance(chosen, Rescaling) or chosen.perturbs:
        require_no_decoder_in_adapters(causal_lm)
    if not state.rescalings and (isinstance(chosen, Rescaling) or chosen.perturbs):
        require_frequencies_of_config(state.original, decoder)
    if state.rescalings:
        require_saved_rope(causal_lm, decoder, state)
    if isinstance(chosen, Rescaling):
        require_one_config(causal_lm, decoder)
        parameters = rescaled(decoder, state.start, chosen)
        if state.source is not None:
            types = {parameters.rope_parameters.get("rope_type", "")}
            _refuse_dynamic(types, state.source.view)
            _refuse_fixed(decoder, types, state.source.view)
        # all that can fail comes before: an error leaves the model as it was
        if state.rescaling is None:
            own_config(model, decoder)
        state.rescaling, state.current = chosen, parameters
        parameters.write(decoder)
        if names_no_window(chosen, parameters.max_position_embeddings):
            remedy = (
                f"pass max_position_embeddings to {chosen.name!r} to write another"
                if hasattr(chosen, "max_position_embeddings")
                else f"{chosen.name!r} has no option that changes it, so tell such a program the longer window"
            )
            logger.warning(
                f"The config still has max_position_embeddings={parameters.max_position_embeddings}, where programs "
                f"that serve the model stop: {remedy}."
            )
        if records_query_scale(parameters.rope_parameters):
            logger.warning(
                f"{chosen.name!r} scales queries by their position, which Transformers cannot say for model type "
                f"{decoder.config.model_type!r}: it loads what is saved without the scale, and warns that it does not "
                f"know {RECORD}. rope_patch.restore_query_scale(model) then puts it back, and load_adapter does."
            )
    else:
        _refuse_dynamic(_types(decoder), chosen)
        _refuse_fixed(decoder, _types(decoder), chosen)
        _refuse_without_layers(decoder, chosen)
        state.source, state.when, state.leader = ViewSource(chosen, seed), when, None
    state.temporary = False
    _install(model, decoder, state)
    _attach_query_scale(decoder, state, state.source)
    return model


def restore_query_scale(model: M) -> M:
    """Scale the queries of a checkpoint as before it was saved, if its config records that and it is not patched.

    Transformers loads such a checkpoint without the scale, and warns that it does not know `rope_patch_query_scale`.
    `load_adapter`, `patch_model` and the commands of this package restore it by themselves.

    Returns:
        The same object.
    """
    config = find_causal_lm(model).config.get_text_config(decoder=True)
    if records_query_scale(getattr(config, "rope_parameters", None) or {}):
        decoder = find_decoder(model)
        if state_of(decoder) is None:
            state = _new_state(decoder)
            _install(model, decoder, state)
            _attach_query_scale(decoder, state, None)
    return model


def unpatch_model(model: M) -> M:
    """Remove every patch: config, frequencies and forward are bit for bit what they were before the first one.

    Returns:
        The same object, also if it was not patched.
    """
    decoder = find_decoder(model)
    state = state_of(decoder)
    if state is not None:
        state.require_no_native_rope("unpatch_model")
        if state.overrides:
            raise ValueError("unpatch_model was called inside rope_view: leave the block first.")
        if state.rescalings:
            require_no_decoder_in_adapters(find_causal_lm(model))
        outer = text_config(find_causal_lm(model), decoder)  # may be another object, if it was replaced since
        if getattr(outer, "rope_parameters", None) == state.current.rope_parameters:
            state.original.write_config(outer)
        state.original.write(decoder)
        _uninstall(model, decoder)
    return model


def view_source(model: nn.Module) -> ViewSource | None:
    """The view that `patch_model` put on `model`, with its last draws and the clock that its draws depend on."""
    state = state_of(find_decoder(model))
    return None if state is None else state.source


@contextmanager
def rope_view(
    model: nn.Module,
    view: str | View | Mapping[str, Any] | None = None,
    *,
    index: torch.Tensor | None = None,
    seed: int = 0,
) -> Iterator[View | None]:
    """Run the forwards inside the block under a view, or with explicit RoPE indices, in training and in evaluation.

    Only the index that RoPE sees changes; causality, padding and packing do not. Sliding and chunked layers stay at
    true positions if full-attention layers have RoPE too. A random view draws once a forward; tokens decoded with a
    cache keep the draws of the forward that filled it. Each block starts its draws from its seed, so a loop that opens
    one block a step passes `seed=step`. Blocks nest, and the innermost decides. Backward may run after the block.

    Args:
        model: a model with RoPE, patched or not.
        view: a view, its name, or both name and options as `{"view": "skip", "split": 512}`.
        index: instead of a view, RoPE indices [batch, seq_len], int or float, for the tokens of the forward; with a
            cache, for all tokens since the cache was empty.
        seed: of the view's draws.

    Raises:
        ValueError: neither or both of view and index, or an index that does not fit the forward's tokens or float32.
    """
    if (view is None) == (index is None):
        raise ValueError("rope_view needs either a view or index=...")
    chosen: View | None = None
    source: ViewSource | TableSource
    if index is None:
        assert view is not None
        chosen = resolve_view(view)
        with _normal_tensors():
            source = ViewSource(chosen, seed)
    else:
        source = TableSource(_checked_index(index))
    with source_in_force(model, source):
        yield chosen


@contextmanager
def source_in_force(model: nn.Module, source: ViewSource | TableSource) -> Iterator[None]:
    """`rope_view` with a source of the caller's, who reads its draws or sets its clock."""
    chosen = source.view if isinstance(source, ViewSource) else None
    decoder = find_decoder(model)
    if chosen is None or chosen.perturbs:
        require_no_decoder_in_adapters(find_causal_lm(model))
    if decoder.training:
        _refuse_dynamic(_types(decoder), chosen)
    _refuse_fixed(decoder, _types(decoder), chosen)
    _refuse_without_layers(decoder, chosen)
    state = _open_block(model, decoder, source)
    try:
        yield
    finally:
        state.overrides.remove(source)
        _end_temporary(model, decoder, state)


@torch.compiler.disable  # Dynamo cannot trace a lock
def _open_block(model: nn.Module, decoder: PreTrainedModel, source: ViewSource | TableSource) -> RopeState:
    with _BLOCKS:
        state = state_of(decoder)
        if state is None:
            with _normal_tensors():
                state = _new_state(decoder)
                state.temporary = True
                _install(model, decoder, state)
        _attach_query_scale(decoder, state, source)
        state.overrides.append(source)
    return state


@contextmanager
def native_rope(model: nn.Module) -> Iterator[None]:
    """Run the block with the RoPE parameters that the model was pretrained with, without its rescaling.

    Views stay in force, and so does the config. Run forwards in the block under `torch.no_grad()` (a teacher), or run
    their backward in it too: some families fold YaRN's factor into the softmax scale, and gradient checkpointing reads
    that scale again in backward. All threads that run the model see the native parameters meanwhile. Blocks nest and
    may end in any order.

    Raises:
        ValueError: patching, unpatching, copying or pickling the model inside the block; or the model is rescaled and
            its family reads RoPE parameters from the config in every forward.
    """
    decoder = find_decoder(model)
    state = state_of(decoder)
    if state is None:  # no patch: the parameters in force are the native ones
        _NATIVE_WITHOUT_PATCH[decoder] = _NATIVE_WITHOUT_PATCH.get(decoder, 0) + 1
        try:
            yield
        finally:
            _NATIVE_WITHOUT_PATCH[decoder] -= 1
        return
    reason = why_no_native_rope(decoder)
    if reason is not None and state.rescalings:
        raise ValueError(reason)
    if state.native_blocks == 0:
        # read them from the modules: dynamic RoPE types keep the frequencies of their last forward
        in_force = RopeParameters.of(decoder)
        state.beside_native = (state.current, in_force, _give_configs(decoder, state.native_configs))
    state.native_blocks += 1
    try:
        state.native.write_modules(decoder)
        state.current = state.native
        yield
    finally:
        state.native_blocks -= 1
        if state.native_blocks == 0:
            assert state.beside_native is not None
            (state.current, in_force, configs), state.beside_native = state.beside_native, None
            in_force.write_modules(decoder)
            _give_configs(decoder, configs)
            _end_temporary(model, decoder, state)


def _give_configs(decoder: nn.Module, configs: dict[str, Any]) -> dict[str, Any]:
    """Give rotary modules these configs, by module name; the config of the decoder, which is saved, stays.

    Returns:
        The configs that they had before.
    """
    if not configs:
        return {}
    modules = rotary_by_name(decoder)
    before = {name: modules[name].config for name in configs}
    for name, config in configs.items():
        modules[name].config = config
    return before


@torch.compiler.disable
def _end_temporary(model: nn.Module, decoder: PreTrainedModel, state: RopeState) -> None:
    """Remove the hooks of a model that only blocks have patched, when the last block ends."""
    with _BLOCKS:
        in_use = state.overrides or state.native_blocks or state.source is not None or state.rescalings
        if state.temporary and not in_use and state_of(decoder) is state:
            state.original.write(decoder)
            # Transformers 5.17 runs hooks of a checkpointed layer again in backward, which may come after the block
            _uninstall(model, decoder, layers=not is_checkpointing(decoder))


def _normal_tensors() -> AbstractContextManager[None]:
    """Leave inference mode for tensors that the model keeps: training cannot use inference tensors."""
    return torch.inference_mode(False)


def _new_state(decoder: PreTrainedModel) -> RopeState:
    original = RopeParameters.of(decoder)
    native = restored_to_float32(original, decoder)
    # frequencies were restored from the config: only right if the config is the one that the model was built from
    if any(native.rotary[name] is not rotary for name, rotary in original.rotary.items()):
        require_frequencies_of_config(original, decoder)
    return RopeState(
        original,
        native,
        current=native,
        start=native,
        local=LocalLayers.of(decoder),
        native_configs=copy.deepcopy(configs_of_forwards(decoder)),
        layers_call_rotary=layers_call_rotary(decoder),
    )


def _install(model: nn.Module, decoder: PreTrainedModel, state: RopeState) -> None:
    if state_of(decoder) is None:
        state.current.write_modules(decoder)
        setattr(decoder, STATE_ATTRIBUTE, state)
        attach_hooks(decoder, rotary_by_name(decoder), state, patch_model)
    watch_adapters(model, find_causal_lm(model))


def _attach_query_scale(decoder: PreTrainedModel, state: RopeState, source: ViewSource | TableSource | None) -> None:
    """Register the hooks that scale queries by position, if the RoPE parameters or a view do so."""
    if state.current.query_scale is not None or (isinstance(source, ViewSource) and source.view.scales_queries):
        attach_layer_hooks(decoder, query_places(decoder))


def _uninstall(model: nn.Module, decoder: PreTrainedModel, *, layers: bool = True) -> None:
    detach_hooks(decoder, rotary_by_name(decoder), layers=layers)
    forget_adapters(model, find_causal_lm(model))
    delattr(decoder, STATE_ATTRIBUTE)


def _types(decoder: nn.Module) -> set[str]:
    return {t for _, module in named_rotary_modules(decoder) for t in rope_types(module)}


def _refuse_dynamic(types: set[str], view: View | None) -> None:
    if any(map(is_dynamic, types)) and (view is None or view.perturbs):
        raise ValueError(
            "rope type 'dynamic' chooses its frequencies by the longest sequence so far and keeps them for the next "
            "forward, so a training view would change more than positions. Rescale with 'ntk' or 'yarn' instead."
        )


def _refuse_fixed(decoder: nn.Module, types: set[str], view: View | None) -> None:
    fixed = why_fixed_frequencies(decoder)
    if fixed is None or (view is not None and not view.perturbs):
        return
    if any(map(is_longrope, types)) or (view is not None and view.rescales):
        raise ValueError(
            f"{fixed}. A view with 'longrope' would change these frequencies too, and a view of frequencies would have "
            "no effect: use another view or rescaling."
        )


def _refuse_without_layers(decoder: PreTrainedModel, view: View | None) -> None:
    """Raise ValueError unless the model has layers that the view can act on."""
    state = state_of(decoder)
    local = LocalLayers.of(decoder) if state is None else state.local
    if view is None or view.perturbs:
        reason = why_no_views(decoder, local)
        if reason is not None:
            raise ValueError(reason)
    if view is not None and view.scales_queries:
        reason = why_no_query_scale(decoder)
        if reason is not None:
            raise ValueError(f"view {view.name!r}: {reason}")
    if view is not None and view.layerwise:
        reason = why_no_layers_apart(decoder)
        if reason is not None:
            raise ValueError(reason)
        view.check_layers(decoder.config.num_hidden_layers, local.layers)


_INDEX_TYPES = (torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)


def _checked_index(index: torch.Tensor) -> torch.Tensor:
    if not isinstance(index, torch.Tensor) or index.ndim != 2 or index.dtype not in _INDEX_TYPES or not index.numel():
        what = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, torch.Tensor) else repr(type(index))
        raise ValueError(
            "index must be a non-empty tensor [batch, seq_len] of int16, int32, int64, float32 or float64 (16-bit "
            f"floats are not exact beyond position 2048), got {what}."
        )
    low, high = index.min().item(), index.max().item()
    if not (-MAX_INDEX <= low and high <= MAX_INDEX):  # NaN fails the comparison too
        raise ValueError(
            f"index must be finite and within +-{MAX_INDEX} (2**24), beyond which float32 is not exact, "
            f"got values in [{low}, {high}]."
        )
    return index.detach()
