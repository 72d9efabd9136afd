"""Rescaling a loaded model in place, so that what is saved is what was run.

Changing `config.rope_parameters` after loading does nothing in Transformers: frequencies are built once. Here the
config is edited and every rotary module takes over the state of one that Transformers builds from the edited config.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..families.local_layers import far_looking_types, why_no_layers
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

# what `rope_parameters` says about scaling, for Transformers or for other programs; other keys (partial_rotary_factor,
# mrope_section) belong to the model
_SCALING_KEYS = frozenset(
    "rope_type type factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
    "truncate short_factor long_factor low_freq_factor high_freq_factor short_mscale long_mscale alpha attn_factor "
    "extrapolation_factor apply_yarn_scaling".split()
)
_QUERY_SCALE = "llama_4_scaling_beta"  # Ministral 3 scales queries by 1 + beta ln(1 + floor(position / L0))


@dataclass(frozen=True)
class RopeParameters:
    """All of a model that its RoPE parameters decide: what differs between two rescalings of it.

    Args:
        rope_parameters: of the text config; of each rotary module's own config, by module name, if it has one.
        max_position_embeddings: window written in the config, in positions; None if it names none.
        rotary: state of each rotary module, by its name below the decoder.
        attention_scales: softmax scales, by (module name below the decoder, attribute).
        older_keys: what the text config says beside `rope_parameters`, for readers of the older form.
    """

    rope_parameters: dict[str, Any]
    own_rope_parameters: dict[str, dict[str, Any]]
    max_position_embeddings: int | None
    rotary: dict[str, RotaryState]
    attention_scales: dict[tuple[str, str], float]
    older_keys: dict[str, Any]

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> "RopeParameters":
        """Those in force."""
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
        """Put them in force: config, rotary modules and softmax scales."""
        self.write_config(decoder.config)
        rotary = rotary_by_name(decoder)
        for name, parameters in self.own_rope_parameters.items():
            if name in rotary:
                rotary[name].config.rope_parameters = parameters
        self.write_modules(decoder)

    def write_config(self, config: Any) -> None:
        """Put them into a text config alone."""
        config.rope_parameters = self.rope_parameters
        write_older_keys(config, self.older_keys)
        if self.max_position_embeddings is not None:
            config.max_position_embeddings = self.max_position_embeddings

    def write_modules(self, decoder: PreTrainedModel) -> None:
        """Put them in force in the modules alone; what would be saved stays."""
        for name, module in rotary_by_name(decoder).items():
            if name in self.rotary:  # else it came after the patch, with the RoPE parameters of the config
                self.rotary[name].write(module)
        modules = {own_name(name): module for name, module in decoder.named_modules()}
        for (name, attribute), value in self.attention_scales.items():
            if name in modules:  # else it was taken out
                setattr(modules[name], attribute, value)


def own_config(model: nn.Module, decoder: PreTrainedModel) -> None:
    """Give `model` a copy of its config, which another model may have been built from, too.

    RoPE parameters written into a shared one would be the other model's as well: it would describe itself, and be
    saved, with frequencies that it does not have.
    """
    copies: dict[int, Any] = {}
    for owner in (find_causal_lm(model), decoder):  # the outer config holds the decoder's where a family nests them
        copy.deepcopy(owner.config, copies)
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and id(config) in copies:
            module.config = copies[id(config)]


def restored_to_float32(parameters: RopeParameters, decoder: PreTrainedModel) -> RopeParameters:
    """The same with the frequencies of the config where a cast of the model had rounded them."""
    modules = rotary_by_name(decoder)
    rotary = {name: state.restored_to_float32(modules[name]) for name, state in parameters.rotary.items()}
    return RopeParameters(
        parameters.rope_parameters,
        parameters.own_rope_parameters,
        parameters.max_position_embeddings,
        rotary,
        parameters.attention_scales,
        parameters.older_keys,
    )


def pretrained_window(rope_parameters: dict[str, Any], window: int | None) -> int | None:
    """Positions that a checkpoint was pretrained on: a rescaled config declares more as its `window`."""
    # 'drop-rope' names a window of 1, which is no window that anybody trained on
    # a config may name it as 64.0, which Transformers takes
    named = [int(s.get("original_max_position_embeddings") or 0) for s in _parameter_sets(rope_parameters)]
    return min((original for original in named if original > 1), default=window)


def _parameter_sets(rope_parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The RoPE parameters of each layer type that has any, or the one dictionary for all."""
    parameter_sets = rope_parameters.values() if is_nested(rope_parameters) else [rope_parameters]
    return [parameters for parameters in parameter_sets if parameters]


def names_no_window(rescaling: Rescaling, window: int | None) -> bool:
    """Whether the config of a rescaled model goes on to declare the `window` that the model came with."""
    return window is not None and rescaling.target_window(window) is None


def rescaled(decoder: PreTrainedModel, native: RopeParameters, rescaling: Rescaling) -> RopeParameters:
    """What `rescaling` makes of `native`, which the weights were trained with. Changes nothing.

    Raises:
        ValueError: the rescaling cannot start from the native RoPE parameters, or leaves what float32 can index.
    """
    config = copy.deepcopy(decoder.config)
    write_older_keys(config, unscaled_keys(config))  # Transformers fills gaps in `rope_parameters` with the others
    window = native.max_position_embeddings
    if window is None:
        raise ValueError(
            f"rescaling {rescaling.name!r} needs the window that the model was trained with, and the config of model "
            f"type {config.model_type!r} names none (max_position_embeddings)."
        )
    target = rescaling.target_window(window)
    if target is not None:
        if target > MAX_INDEX:
            raise ValueError(
                f"rescaling {rescaling.name!r}: the target window would be {target} positions; at most {MAX_INDEX} "
                f"(2**24) are exact in float32. Use a smaller factor than the one that makes {target} of {window}."
            )
    # without a target the window is the native one again, whatever another rescaling has declared before
    config.max_position_embeddings = window if target is None else target
    reason = why_no_layers(decoder)
    if reason is not None:
        raise ValueError(f"rescaling {rescaling.name!r} would change nothing: {reason}")
    if is_nested(native.rope_parameters):
        chosen = far_looking_types(native.rope_parameters, native.rotary)
        config.rope_parameters = {
            # without `truncate`, which Transformers does not look for in a layer type
            layer_type: _merged(
                {k: v for k, v in parameters.items() if k != "truncate"},
                rescaling,
                native,
                window,
                f"{layer_type}_inv_freq",
            )
            if layer_type in chosen
            else copy.deepcopy(parameters)
            for layer_type, parameters in native.rope_parameters.items()
        }
    else:
        config.rope_parameters = _merged(native.rope_parameters, rescaling, native, window, "inv_freq")
    _require_bases(native, rescaling, config.rope_parameters)
    asked = config.rope_parameters.get("original_max_position_embeddings")
    with _as_refusal(rescaling, config):
        config.standardize_rope_params()
        config.validate_rope()
    _require_window_asked(rescaling, config, asked)

    modules = rotary_by_name(decoder)
    by_module: dict[str, dict[str, Any]] = {}
    rotary: dict[str, RotaryState] = {}
    for name, module in modules.items():
        module_config: Any = config
        if name in native.own_rope_parameters:
            by_module[name] = _merged(native.own_rope_parameters[name], rescaling, native, window, "inv_freq")
            module_config = copy.deepcopy(module.config)
            module_config.rope_parameters = by_module[name]
        with _as_refusal(rescaling, config):
            rotary[name] = fresh_state(module, module_config)
        _require_shapes(rescaling, config, native.rotary[name], rotary[name])
        if is_nested(config.rope_parameters):
            _require_all_read(rescaling, config, rotary[name])
    scales = _scales_of_twin(decoder, config) if native.attention_scales else {}
    _require_softmax_scaled(rescaling, decoder, config)
    _require_softmax_kept(rescaling, native, config, scales)
    return RopeParameters(
        config.rope_parameters, by_module, config.max_position_embeddings, rotary, scales, resumable_form(config)
    )


def _require_bases(native: RopeParameters, rescaling: Rescaling, rope_parameters: dict[str, Any]) -> None:
    """Raise if modules are found by their base, in which one rescaling would make them one."""
    if native.own_rope_parameters and rope_parameters.get("rope_theta") != native.rope_parameters.get("rope_theta"):
        raise ValueError(
            f"rescaling {rescaling.name!r} changes the base of all frequencies, and layers of this model have bases of "
            "their own (layer_rope_theta), by which it finds their frequencies. Use 'pi' or 'yarn', which keep them."
        )


def _require_window_asked(rescaling: Rescaling, config: Any, asked: int | None) -> None:
    """Raise if Transformers takes another window to stretch, as where a family names it beside the RoPE parameters."""
    taken = config.rope_parameters.get("original_max_position_embeddings")
    if taken != asked:
        raise ValueError(
            f"rescaling {rescaling.name!r}: original_max_position_embeddings must be {taken}, which the config of "
            f"model type {config.model_type!r} names beside its RoPE parameters and Transformers takes instead of any "
            f"other, got {asked}. Pass {taken}, or load the model with a config that names {asked}."
        )


def _require_softmax_scaled(rescaling: Rescaling, decoder: PreTrainedModel, config: Any) -> None:
    """Raise if `mscale_all_dim` is given to scale the softmax alone, and the family does not scale it by that."""
    options = rescaling.options()
    if "mscale_all_dim" not in options or "mscale" in options or options.get("factor") == 1:
        return
    if not softmax_reads_mscale(decoder, config):
        raise ValueError(
            f"rescaling {rescaling.name!r}: mscale_all_dim must come with mscale for model type {config.model_type!r}, "
            f"whose softmax it does not scale, so that it has no effect alone; got {options}. Pass mscale too, and no "
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
    """Raise if the native RoPE parameters scale the softmax, as DeepSeek's do, and those of another type would not."""
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


def _require_shapes(rescaling: Rescaling, config: Any, before: RotaryState, after: RotaryState) -> None:
    """Raise if Transformers builds another number of frequencies, as it does where it takes another head_dim."""
    for name, (buffer, _) in after.buffers.items():
        old = before.buffers.get(name)
        if old is not None and old[0].shape != buffer.shape:
            raise ValueError(
                f"rescaling {rescaling.name!r}: for model type {config.model_type!r} Transformers builds "
                f"{buffer.numel()} frequencies of these RoPE parameters ({name}), and the model rotates by "
                f"{old[0].numel()}."
            )


def _require_all_read(rescaling: Rescaling, config: Any, built: RotaryState) -> None:
    """Raise if a layer type's frequencies are not those of its RoPE parameters, as where an option is not read."""
    for layer_type, parameters in config.rope_parameters.items():
        buffer = built.buffers.get(f"{layer_type}_inv_freq")
        initialise = ROPE_INIT_FUNCTIONS.get(parameters["rope_type"])
        if buffer is None or initialise is None:
            continue
        alone = copy.deepcopy(config)
        try:
            alone.rope_parameters = copy.deepcopy(parameters)
            expected, _ = initialise(alone, None)
        except Exception:  # of its own kind in every family whose config takes no RoPE parameters but by layer type
            continue
        if not torch.allclose(buffer[0].cpu(), expected.cpu(), rtol=1e-5, atol=0):
            raise ValueError(
                f"rescaling {rescaling.name!r} with {rescaling.options()}: for model type {config.model_type!r}, whose "
                "RoPE differs by layer, Transformers builds other frequencies than the options ask for, as it does "
                "not look for all of them there (for 'yarn': truncate). Leave that option out."
            )


@contextmanager
def _as_refusal(rescaling: Rescaling, config: Any) -> Iterator[None]:
    """What Transformers raises for RoPE parameters that a family does not take, as a refusal that says so."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"rescaling {rescaling.name!r}: Transformers takes no such RoPE parameters for model type "
            f"{config.model_type!r}: "
            f"{error}"
        ) from error


def _merged(
    parameters: dict[str, Any], rescaling: Rescaling, native: RopeParameters, window: int, buffer: str
) -> dict[str, Any]:
    """`parameters` with their scaling replaced by that of `rescaling`.

    What the options leave open stays as it is in `parameters` of the same type. An attention factor stays, too, unless
    it is the one that follows from the factor, which then follows from the new factor.
    """
    frequencies = next(
        (state.buffers[buffer][0] for state in native.rotary.values() if buffer in state.buffers),
        None,
    )
    if frequencies is None:
        raise ValueError(f"rescaling {rescaling.name!r}: this model's rotary modules hold no {buffer!r} to rescale.")
    new = rescaling.rope_parameters(NativeRope(parameters, window, 2 * frequencies.numel()))
    is_same_type = new["rope_type"] == parameters["rope_type"]
    asked = rescaling.options()
    left_open = {f.name for f in fields(rescaling)} - set(asked)  # type: ignore[arg-type]
    kept = {k: v for k, v in parameters.items() if is_same_type or k not in _SCALING_KEYS}
    if is_same_type:
        new = {k: v for k, v in new.items() if k not in left_open or k not in parameters}
    kept.pop("attention_factor", None)
    reads_factor = is_same_type or "attention_factor" in left_open
    if reads_factor and "mscale" not in asked and has_own_attention_factor(parameters, window):
        kept["attention_factor"] = parameters["attention_factor"]
    origin = parameters.get("original_max_position_embeddings")
    if _QUERY_SCALE in parameters:
        kept["original_max_position_embeddings"] = origin
    merged = copy.deepcopy({**kept, **new})
    if parameters.get(_QUERY_SCALE) and merged["original_max_position_embeddings"] != origin:
        raise ValueError(
            f"rescaling {rescaling.name!r} would set original_max_position_embeddings to "
            f"{merged['original_max_position_embeddings']}, and this model scales its queries by how far a position "
            f"lies beyond {origin}, which it reads there ({_QUERY_SCALE}). Use 'abf', which keeps it, or pass "
            f"original_max_position_embeddings={origin} to a rescaling that has this option."
        )
    return merged


def _scales_of_twin(decoder: PreTrainedModel, config: Any) -> dict[tuple[str, str], float]:
    """Softmax scales of a decoder built from `config`, without its weights."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # the twin attends to nothing: no kernel has to be there for it
    config.dtype = decoder.dtype  # save_pretrained leaves its name there, which Apertus hands to torch
    # DiffLlama's constructor draws from torch's global generator, also for tensors on meta
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        twin = type(decoder)(config)
    present = attention_scales(decoder)
    return {place: scale for place, scale in attention_scales(twin).items() if place in present}
