"""Rescale a loaded model in place, so that the saved checkpoint is the model that ran.

Transformers builds frequencies once, so a change of `config.rope_parameters` after loading has no effect. Here the
config is edited, Transformers builds rotary modules from it, and their state is copied into the modules of the model.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..families.local_layers import far_looking_types, why_no_layers
from ..families.queries import BETA, RECORD, why_no_query_scale
from ..rope.older_form import older_keys, resumable_form, unscaled_keys, write_older_keys
from ..rope.rotary import (
    RotaryState,
    attention_scales,
    find_causal_lm,
    fresh_state,
    has_own_attention_factor,
    is_nested,
    own_name,
    rotary_by_name,
    rotary_states,
)
from ..views.base import MAX_INDEX
from . import NativeRope, Rescaling
from .frequencies import chosen_frequencies, trained_frequencies
from .query_scale import query_scale_of

# the keys of `rope_parameters` about scaling, of Transformers and other programs; the others (partial_rotary_factor,
# mrope_section) belong to the architecture
_SCALING_KEYS = frozenset(
    "rope_type type factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
    "truncate short_factor long_factor low_freq_factor high_freq_factor short_mscale long_mscale alpha attn_factor "
    "extrapolation_factor apply_yarn_scaling".split()
)


@dataclass(frozen=True)
class RopeParameters:
    """Everything in a model that depends on its RoPE parameters.

    Args:
        rope_parameters: of the text config.
        own_rope_parameters: of the rotary modules that have another config, by module name.
        max_position_embeddings: context window in the config, in positions; None if it has none.
        rotary: state of each rotary module, by its name below the decoder.
        attention_scales: softmax scales, by (module name below the decoder, attribute).
        older_keys: keys of the text config in the form of Transformers 4, beside `rope_parameters`.
    """

    rope_parameters: dict[str, Any]
    own_rope_parameters: dict[str, dict[str, Any]]
    max_position_embeddings: int | None
    rotary: dict[str, RotaryState]
    attention_scales: dict[tuple[str, str], float]
    older_keys: dict[str, Any]

    @cached_property
    def query_scale(self) -> Rescaling | None:
        """The rescaling that scales queries by position, if any."""
        return query_scale_of(self.rope_parameters)

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> "RopeParameters":
        """The parameters in force."""
        return cls(
            rope_parameters=decoder.config.rope_parameters,
            own_rope_parameters={
                n: m.config.rope_parameters
                for n, m in rotary_by_name(decoder).items()
                if m.config is not decoder.config
            },
            max_position_embeddings=getattr(decoder.config, "max_position_embeddings", None),
            rotary=rotary_states(decoder),
            attention_scales=attention_scales(decoder),
            older_keys=older_keys(decoder.config),
        )

    def write(self, decoder: PreTrainedModel) -> None:
        """Write the parameters to config, rotary modules and softmax scales."""
        self.write_config(decoder.config)
        rotary = rotary_by_name(decoder)
        for name, parameters in self.own_rope_parameters.items():
            if name in rotary:
                rotary[name].config.rope_parameters = parameters
        self.write_modules(decoder)

    def write_config(self, config: Any) -> None:
        """Write the parameters to a text config only."""
        config.rope_parameters = self.rope_parameters
        write_older_keys(config, self.older_keys)
        if self.max_position_embeddings is not None:
            config.max_position_embeddings = self.max_position_embeddings

    def write_modules(self, decoder: PreTrainedModel) -> None:
        """Write the parameters to the modules only; the config, which is saved, stays."""
        for name, module in rotary_by_name(decoder).items():
            if name in self.rotary:  # not a module that was added after the patch
                self.rotary[name].write(module)
        modules = {own_name(name): module for name, module in decoder.named_modules()}
        for (name, attribute), value in self.attention_scales.items():
            if name in modules:  # the module may have been removed
                setattr(modules[name], attribute, value)


def own_config(model: nn.Module, decoder: PreTrainedModel) -> None:
    """Give `model` a copy of its config: a rescaling must not reach the config of another model that shares it."""
    copies: dict[int, Any] = {}  # by id of the original: deepcopy's memo, which has nested configs too
    for owner in (find_causal_lm(model), decoder):  # some families nest the decoder's config in the outer one
        copy.deepcopy(owner.config, copies)
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and id(config) in copies:
            module.config = copies[id(config)]


def restored_to_float32(parameters: RopeParameters, decoder: PreTrainedModel) -> RopeParameters:
    """The parameters with float32 frequencies from the config, if a cast of the model has rounded them."""
    modules = rotary_by_name(decoder)
    rotary = {name: state.restored_to_float32(modules[name]) for name, state in parameters.rotary.items()}
    return replace(parameters, rotary=rotary)


def pretrained_window(rope_parameters: dict[str, Any], window: int | None) -> int | None:
    """The context window of pretraining; `window` is the one in the config, which is larger after a rescaling."""
    # 'drop-rope' writes 1, which is not a trained window; a config may have 64.0, which Transformers accepts
    originals = [int(s.get("original_max_position_embeddings") or 0) for s in _parameter_sets(rope_parameters)]
    return min((original for original in originals if original > 1), default=window)


def _parameter_sets(rope_parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The RoPE parameters of each layer type that has any, or the one dictionary for all."""
    parameter_sets = rope_parameters.values() if is_nested(rope_parameters) else [rope_parameters]
    return [parameters for parameters in parameter_sets if parameters]


def names_no_window(rescaling: Rescaling, window: int | None) -> bool:
    """Whether a rescaling keeps the model's `window` as max_position_embeddings."""
    return window is not None and rescaling.target_window(window) is None


def rescaled(decoder: PreTrainedModel, native: RopeParameters, rescaling: Rescaling) -> RopeParameters:
    """The parameters after `rescaling` of the `native` ones, with which the weights were trained.

    Raises:
        ValueError: the rescaling cannot start from these parameters, or its window is too large for float32.
    """
    config = copy.deepcopy(decoder.config)
    # Transformers would fill gaps in `rope_parameters` from the older keys
    write_older_keys(config, unscaled_keys(config))
    window = native.max_position_embeddings
    if window is None:
        raise ValueError(
            f"rescaling {rescaling.name!r} needs the context window of pretraining, and the config of model type "
            f"{config.model_type!r} has no max_position_embeddings: set it."
        )
    target = rescaling.target_window(window)
    if target is not None and target > MAX_INDEX:
        raise ValueError(
            f"rescaling {rescaling.name!r}: the target window would be {target} positions; at most {MAX_INDEX} "
            f"(2**24) are exact in float32. Use a smaller factor than the one that makes {target} of {window}."
        )
    # without a target, write the native window again: an earlier rescaling may have changed it
    config.max_position_embeddings = window if target is None else target
    reason = why_no_layers(decoder)
    if reason is not None:
        raise ValueError(f"rescaling {rescaling.name!r} would change nothing: {reason}")
    start: dict[str, NativeRope] = {}  # by buffer of a rotary module
    if is_nested(native.rope_parameters):
        # Transformers looks for `truncate` beside the layer types, where validate_rope allows no such key
        if rescaling.options().get("truncate") is False:
            raise ValueError(
                f"rescaling {rescaling.name!r}: truncate=False has no effect for model type {config.model_type!r}, "
                "whose RoPE differs by layer. Leave that option out."
            )
        rope_parameters = copy.deepcopy(native.rope_parameters)
        for layer_type in far_looking_types(native.rope_parameters, native.rotary):
            read = {key: value for key, value in rope_parameters[layer_type].items() if key != "truncate"}
            start[f"{layer_type}_inv_freq"] = _native_rope(read, rescaling, native.rotary, window, f"{layer_type}_")
            rope_parameters[layer_type] = _merged(rescaling, start[f"{layer_type}_inv_freq"])
        config.rope_parameters = rope_parameters
    else:
        shared = {name: state for name, state in native.rotary.items() if name not in native.own_rope_parameters}
        start["inv_freq"] = _native_rope(native.rope_parameters, rescaling, shared or native.rotary, window)
        config.rope_parameters = _merged(rescaling, start["inv_freq"])
    _require_bases(native, rescaling, config.rope_parameters)
    origin = config.rope_parameters.get("original_max_position_embeddings")
    with _as_refusal(rescaling, config):
        config.standardize_rope_params()
        config.validate_rope()
    if not rescaling.gives_frequencies:  # which have one set of divisors for texts of any length
        _require_origin(rescaling, config, origin)

    modules = rotary_by_name(decoder)
    by_module: dict[str, dict[str, Any]] = {}
    rotary: dict[str, RotaryState] = {}
    for name, module in modules.items():
        module_config: Any = config
        of_module = start
        if name in native.own_rope_parameters:
            own = _native_rope(native.own_rope_parameters[name], rescaling, {name: native.rotary[name]}, window)
            of_module, by_module[name] = {"inv_freq": own}, _merged(rescaling, own)
            if rescaling.gives_frequencies:  # the saved config has one dictionary for all layers, apart from bases
                by_module[name] = {**config.rope_parameters, "rope_theta": own.rope_theta}
            module_config = copy.deepcopy(module.config)
            module_config.rope_parameters = by_module[name]
        with _as_refusal(rescaling, config):
            rotary[name] = fresh_state(module, module_config)
        _require_shapes(rescaling, config, native.rotary[name], rotary[name])
        if rescaling.gives_frequencies:
            _require_frequencies(rescaling, config, of_module, rotary[name])
    scales = _scales_of_twin(decoder, config) if native.attention_scales else {}
    _require_softmax_scaled(rescaling, decoder, config)
    _require_softmax_kept(rescaling, native, config, scales)
    older = resumable_form(config)
    if rescaling.scales_queries:
        _record_query_scale(rescaling, decoder, native, config.rope_parameters, older)
    return RopeParameters(config.rope_parameters, by_module, config.max_position_embeddings, rotary, scales, older)


def _record_query_scale(
    rescaling: Rescaling,
    decoder: PreTrainedModel,
    native: RopeParameters,
    rope_parameters: dict[str, Any],
    older: dict[str, Any],
) -> None:
    """Write a scale of queries into RoPE parameters of a family that does not read this one itself.

    Raises:
        ValueError: the queries of this family cannot be scaled.
    """
    nested = is_nested(rope_parameters)
    types = far_looking_types(native.rope_parameters, native.rotary) if nested else ()
    parameter_sets = [rope_parameters[layer_type] for layer_type in types] if nested else [rope_parameters]
    for parameters in parameter_sets:
        parameters.pop(RECORD, None)
    if query_scale_of(rope_parameters) == rescaling:
        return
    reason = why_no_query_scale(decoder)
    if reason is not None:
        raise ValueError(f"rescaling {rescaling.name!r}: {reason}")
    for parameters in (*parameter_sets, *filter(None, [older.get("rope_scaling")])):
        parameters[RECORD] = {"method": rescaling.name, "options": rescaling.options()}
        if BETA in parameters:
            parameters[BETA] = 0.0


def _require_bases(native: RopeParameters, rescaling: Rescaling, rope_parameters: dict[str, Any]) -> None:
    """Raise ValueError for a new base where each layer has a base, since all layers would get the new one."""
    if native.own_rope_parameters and rope_parameters.get("rope_theta") != native.rope_parameters.get("rope_theta"):
        raise ValueError(
            f"rescaling {rescaling.name!r} changes the base of all frequencies, and the bases of this model differ by "
            "layer (layer_rope_theta). Use 'pi' or 'yarn', which keep them."
        )


def _require_origin(rescaling: Rescaling, config: Any, origin: int | None) -> None:
    """Raise ValueError if Transformers stretches another window than `origin`, such as Phi-3's in its config."""
    taken = config.rope_parameters.get("original_max_position_embeddings")
    if taken != origin:
        raise ValueError(
            f"rescaling {rescaling.name!r}: original_max_position_embeddings must be {taken}, which the config of "
            f"model type {config.model_type!r} names beside its RoPE parameters and Transformers takes instead of any "
            f"other, got {origin}. Pass {taken}, or load the model with a config that names {origin}."
        )


def _require_softmax_scaled(rescaling: Rescaling, decoder: PreTrainedModel, config: Any) -> None:
    """Raise ValueError if `mscale_all_dim` is given to scale the softmax, and the family does not read it."""
    options = rescaling.options()
    if "mscale_all_dim" not in options or "mscale" in options or options.get("factor") == 1:
        return
    if not softmax_reads_mscale(decoder, config):
        raise ValueError(
            f"rescaling {rescaling.name!r}: mscale_all_dim must come with mscale for model type {config.model_type!r}, "
            f"whose softmax it does not scale, so that it has no effect; got {options}. Pass mscale too, and no "
            "attention_factor, or leave mscale_all_dim out."
        )


def softmax_reads_mscale(decoder: PreTrainedModel, config: Any) -> bool:
    """Whether `mscale_all_dim` in the RoPE parameters of a text config scales the softmax, as for DeepSeek."""
    without = copy.deepcopy(config)
    for parameters in _parameter_sets(without.rope_parameters):
        parameters.pop("mscale_all_dim", None)
    if without.rope_parameters == config.rope_parameters:
        return False
    return _scales_of_twin(decoder, without) != _scales_of_twin(decoder, config)


def _require_softmax_kept(
    rescaling: Rescaling, native: RopeParameters, config: Any, scales: dict[tuple[str, str], float]
) -> None:
    """Raise ValueError if the native RoPE parameters scale the softmax, as DeepSeek's do, and the new ones do not."""
    before, after = (
        [parameters.get("mscale_all_dim") for parameters in _parameter_sets(rope_parameters)]
        for rope_parameters in (native.rope_parameters, config.rope_parameters)
    )
    if any(before) and not any(after) and scales != native.attention_scales:
        raise ValueError(
            f"rescaling {rescaling.name!r} has no mscale_all_dim, by which the native RoPE parameters scale the "
            f"softmax of model type {config.model_type!r} ({before}): the weights were trained with that scale. Use "
            "'yarn', which keeps mscale_all_dim, or 'abf'."
        )


def _require_frequencies(rescaling: Rescaling, config: Any, start: dict[str, NativeRope], built: RotaryState) -> None:
    """Raise ValueError if Transformers builds other frequencies, or another scaling, than a rescaling chooses."""
    for buffer, native in start.items():
        if buffer not in built.buffers or built.buffers[buffer][0].is_meta:
            continue
        theta, scaling = chosen_frequencies(rescaling, native)
        is_built = torch.allclose(built.buffers[buffer][0].cpu().double(), theta, rtol=1e-5, atol=1e-30)
        own_scaling = built.attributes.get(f"{buffer.removesuffix('inv_freq')}attention_scaling", 1.0)
        if not is_built or not math.isclose(own_scaling, scaling, rel_tol=1e-6):
            raise ValueError(
                f"rescaling {rescaling.name!r}: no rope_type says its frequencies for model type "
                f"{config.model_type!r}, where Transformers builds others ({buffer}) from {config.rope_parameters}. "
                "Use 'abf', or a rescaling that divides all frequencies by one number."
            )


def _require_shapes(rescaling: Rescaling, config: Any, before: RotaryState, after: RotaryState) -> None:
    """Raise ValueError if Transformers builds another number of frequencies, e.g. from another head_dim."""
    for name, (buffer, _) in after.buffers.items():
        old = before.buffers.get(name)
        if old is not None and old[0].shape != buffer.shape:
            raise ValueError(
                f"rescaling {rescaling.name!r}: for model type {config.model_type!r} Transformers builds "
                f"{buffer.numel()} frequencies from these RoPE parameters ({name}), and the model has "
                f"{old[0].numel()}: use another rescaling."
            )


@contextmanager
def _as_refusal(rescaling: Rescaling, config: Any) -> Iterator[None]:
    """Raise ValueError, naming the rescaling, where Transformers refuses RoPE parameters."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"rescaling {rescaling.name!r}: Transformers does not accept these RoPE parameters for model type "
            f"{config.model_type!r}: {error}"
        ) from error


def _native_rope(
    parameters: dict[str, Any], rescaling: Rescaling, rotary: Mapping[str, RotaryState], window: int, prefix: str = ""
) -> NativeRope:
    """What a rescaling starts from: `parameters` and, of the first of `rotary` that has them, their frequencies."""
    buffer = f"{prefix}inv_freq"
    state = next((state for state in rotary.values() if buffer in state.buffers), None)
    if state is None:
        raise ValueError(f"rescaling {rescaling.name!r}: this model's rotary modules hold no {buffer!r} to rescale.")
    theta = trained_frequencies(state.buffers[buffer][0], parameters)
    return NativeRope(parameters, window, theta, state.attributes.get(f"{prefix}attention_scaling", 1.0))


def _merged(rescaling: Rescaling, native: NativeRope) -> dict[str, Any]:
    """The RoPE parameters of `native` with the scaling of `rescaling`.

    If they have the same type, options that are left out keep their values. An attention factor is kept too, unless it
    follows from the factor by the formula: then Transformers computes it from the new factor.
    """
    parameters, new = dict(native.rope_parameters), rescaling.rope_parameters(native)
    is_same_type = new["rope_type"] == parameters["rope_type"]
    options = rescaling.options()
    names = set() if rescaling.gives_frequencies else {f.name for f in fields(rescaling)}  # type: ignore[arg-type]
    left_open = names - set(options)
    kept = {k: v for k, v in parameters.items() if is_same_type or k not in _SCALING_KEYS}
    if is_same_type:
        # without what `rescaling.rope_parameters` filled in for options that the native parameters have
        new = {k: v for k, v in new.items() if k not in left_open or k not in parameters}
    kept.pop("attention_factor", None)
    reads_factor = is_same_type or "attention_factor" in left_open
    if reads_factor and "mscale" not in options and has_own_attention_factor(parameters, native.window):
        kept["attention_factor"] = parameters["attention_factor"]
    origin = parameters.get("original_max_position_embeddings")
    if BETA in parameters:
        kept["original_max_position_embeddings"] = origin
    merged = copy.deepcopy({**kept, **new})
    if parameters.get(BETA) and merged["original_max_position_embeddings"] != origin:
        raise ValueError(
            f"rescaling {rescaling.name!r} would set original_max_position_embeddings to "
            f"{merged['original_max_position_embeddings']}, and this model scales its queries by how far a position "
            f"lies beyond {origin}, which it reads there ({BETA}). Use 'abf', which keeps it, or pass "
            f"original_max_position_embeddings={origin} to a rescaling that has this option."
        )
    return merged


def _scales_of_twin(decoder: PreTrainedModel, config: Any) -> dict[tuple[str, str], float]:
    """Softmax scales of a decoder built from `config`, without its weights."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # the twin never runs, so it needs no kernel
    config.dtype = decoder.dtype  # save_pretrained leaves a string there, which Apertus passes to torch
    # DiffLlama's constructor draws from torch's global generator, also for tensors on meta
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        twin = type(decoder)(config)
    present = attention_scales(decoder)
    return {place: scale for place, scale in attention_scales(twin).items() if place in present}
