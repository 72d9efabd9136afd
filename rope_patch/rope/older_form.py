"""RoPE parameters in the form of Transformers 4: `rope_theta` and `rope_scaling` in config.json.

Transformers 5 writes only `rope_parameters`. Older versions and some programs, such as mlx-lm, ignore that key: they
load such a checkpoint with base 10000 and without a rescaling, and raise no error.
"""

import copy
from collections.abc import Iterator
from typing import Any

from .rotary import is_nested, with_factor

_TRAINED_WINDOW = "original_max_position_embeddings"
# keys of Transformers 4 for a base or a scaling; LongRoPE reads its window only from the last one
_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", _TRAINED_WINDOW)
# types whose `rope_scaling` has original_max_position_embeddings
_NAMING_THE_WINDOW = ("yarn", "llama3", "longrope")


def older_keys(config: Any) -> dict[str, Any]:
    """The keys of the older form that a text config has as instance attributes."""
    return {key: vars(config)[key] for key in _keys_of(config) if key in vars(config)}


def _keys_of(config: Any) -> tuple[str, ...]:
    """Without the trained window for Phi-3, whose config always has it in Transformers 5."""
    return _KEYS[:-1] if hasattr(type(config), _TRAINED_WINDOW) else _KEYS


def write_older_keys(config: Any, keys: dict[str, Any]) -> None:
    """Let `config` be saved with exactly these `keys` of the older form.

    They go to the instance dictionary, which is saved: setting `rope_scaling`, a property in Transformers 5, would set
    `rope_parameters`.
    """
    for key in _keys_of(config):
        vars(config).pop(key, None)
    vars(config).update(copy.deepcopy(keys))


def unscaled_keys(config: Any) -> dict[str, Any]:
    """The `older_keys` that no rescaling changes."""
    return {key: value for key, value in older_keys(config).items() if key == "partial_rotary_factor"}


def older_form(config: Any) -> dict[str, Any]:
    """The RoPE parameters of a text config in the older form.

    `rope_theta` is the base, and `rope_scaling` has the rest if there is a scaling. With sliding and full layers, as in
    Gemma 3, both describe the full layers, and `rope_local_base_freq` is the base of the sliding layers.

    Returns:
        The keys to write beside `rope_parameters`; those that `config` already has, if the family cannot read these
        RoPE parameters from the older form.
    """
    # what a program reads that knows both forms, and one that ignores `rope_parameters`
    both = {key: value for key, value in config.to_dict().items() if key not in _keys_of(config)}
    alone = {key: value for key, value in both.items() if key != "rope_parameters"}
    for candidate in _candidates(config):
        keys = {key: value for key, value in candidate.items() if key in _keys_of(config)}
        try:
            read = [type(config)(**copy.deepcopy({**entries, **keys})) for entries in (both, alone)]
        except Exception:  # the kind of error differs by family
            continue
        # a family that keeps `rope_local_base_freq` as an attribute does not know the key
        known = not any("rope_local_base_freq" in vars(config_read) for config_read in read)
        if known and all(_comparable(config_read) == _comparable(config) for config_read in read):
            return keys
    return older_keys(config)


def resumable_form(config: Any) -> dict[str, Any]:
    """The part of `older_form` that a checkpoint of a training run can have.

    Trainer reads config.json without the family's class when it resumes, and fails on a `rope_scaling` with
    original_max_position_embeddings. `export` adds those keys later.
    """
    keys = older_form(config)
    scaling = keys.get("rope_scaling", {})
    if scaling.get("type") in _NAMING_THE_WINDOW:
        return unscaled_keys(config)
    scaling.pop("type", None)  # Transformers would add it to `rope_parameters` beside `rope_type`
    return keys


def _candidates(config: Any) -> Iterator[dict[str, Any]]:
    parameters = config.rope_parameters
    kept = unscaled_keys(config)
    if not is_nested(parameters):
        if config.model_type.startswith("phi3"):
            yield {**kept, **_of_phi3(config)}
        yield {**kept, **_flat(parameters)}
        return
    full, sliding = parameters.get("full_attention"), parameters.get("sliding_attention")
    if full and sliding and len(parameters) == 2 and set(sliding) <= {"rope_type", "rope_theta"}:
        yield {**kept, **_flat(full), "rope_local_base_freq": sliding["rope_theta"]}


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    form: dict[str, Any] = {
        key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters
    }
    if form.get("partial_rotary_factor") == 1.0:
        del form["partial_rotary_factor"]
    # with the trained window, which all types but LongRoPE read there
    scaling = {key: copy.deepcopy(value) for key, value in parameters.items() if key not in _KEYS[:-1]}
    if scaling.get("rope_type", "default") != "default" or len(scaling) > 1:
        # the name before Transformers 4.45, which some programs read
        form["rope_scaling"] = {**scaling, "type": scaling.get("rope_type", "default")}
    if scaling.get("rope_type") == "longrope":
        form[_TRAINED_WINDOW] = scaling[_TRAINED_WINDOW]
    return form


def _of_phi3(config: Any) -> dict[str, Any]:
    """Phi-3 accepts exactly three fields of a scaling and computes the factor from the windows."""
    form = _flat(config.rope_parameters)
    scaling = form.get("rope_scaling", {})
    if scaling.get("rope_type") == "longrope" and "attention_factor" not in scaling:
        divisors = {key: scaling[key] for key in ("short_factor", "long_factor")}
        form["rope_scaling"] = {"type": "longrope", **divisors}
    return form


def _comparable(config: Any) -> dict[str, Any]:
    """RoPE parameters by layer type, with the defaults of missing keys, without `type`, the old name of rope_type."""
    parameters = config.rope_parameters
    compared: dict[str, Any] = {}
    for layer_type, entries in (parameters if is_nested(parameters) else {"": parameters}).items():
        if entries is not None:
            entries = {"partial_rotary_factor": 1.0, **{key: value for key, value in entries.items() if key != "type"}}
            entries = with_factor(entries, getattr(config, "max_position_embeddings", None))
        compared[layer_type] = entries
    return compared
