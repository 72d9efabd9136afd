"""The RoPE of an adapter's training: written beside the adapter as `rope_patch.json`, restored when it is loaded.

`adapter_config.json` has no key for RoPE, so a plain reload on the base model gives another model. To warn users
without this package, we add an unknown key to that file, whose name PEFT shows in a warning.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.utils import logging

from ..base.json_records import read_record
from ..methods import resolve_rescaling, resolve_view
from ..rescalings import Rescaling
from ..rope.rotary import find_causal_lm, find_decoder, with_factors
from ..version import __version__
from ..views import View

if TYPE_CHECKING:
    from ..forward.state import RopeState

logger = logging.get_logger(__name__)

SIDECAR_NAME = "rope_patch.json"
# PEFT shows this key, without its value, when the adapter is loaded without this package
CONFIG_MARK = (
    "This adapter needs the RoPE scaling that it was trained with and gives wrong output without it: load it with "
    "rope_patch.load_adapter (pip install rope-patch). Upgrading PEFT does not help."
)
_FORMAT = 1
_SHAPE = {
    "format": int,
    "rescalings": [{"method": str, "options": dict}],
    "view": dict | None,
    "rope_parameters": dict,
    "max_position_embeddings": int | None,
    "native_rope_parameters": dict,
    "native_max_position_embeddings": int | None,
    "rope_patch_version": str,
}


def specification(state: "RopeState") -> dict[str, Any]:
    """The RoPE of this model as JSON values, to be saved with an adapter."""
    sampled = state.ended if state.source is None else (state.source.view, state.when)
    view: dict[str, Any] | None = None
    if sampled is not None:
        view = {
            "method": sampled[0].name,
            "repr": repr(sampled[0]),
            "when": sampled[1],
            "options": _options_of(sampled[0]),
            "seed": 0 if state.source is None else state.source.clock.seed,
        }
    # inside `native_rope`, the parameters that its end restores
    current = state.current if state.beside_native is None else state.beside_native[0]
    return {
        "format": _FORMAT,
        "rescalings": [{"method": rescaling.name, "options": rescaling.options()} for rescaling in state.rescalings],
        "view": view,
        "rope_parameters": current.rope_parameters,
        "max_position_embeddings": current.max_position_embeddings,
        "native_rope_parameters": state.native.rope_parameters,
        "native_max_position_embeddings": state.native.max_position_embeddings,
        "rope_patch_version": __version__,
    }


def mark_config(directory: Path) -> None:
    """Add a key to the adapter's config that makes PEFT warn when the adapter is loaded without its RoPE."""
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config[CONFIG_MARK] = (
        f"It was trained with the RoPE in {SIDECAR_NAME}: PEFT alone runs it with the RoPE of its base model."
    )
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def require_no_lost_sidecar(directory: Path) -> None:
    """Raise FileNotFoundError if an adapter was saved with `rope_patch.json`, but the file is gone."""
    path = directory / "adapter_config.json"
    if path.is_file() and CONFIG_MARK in read_adapter_config(directory):
        raise FileNotFoundError(
            f"{directory / SIDECAR_NAME} does not exist. By an entry of {path} it was saved with the adapter, "
            "whose RoPE is not that of its base model: copy it from where the adapter was saved. If you know "
            "the RoPE, remove that entry, load the adapter with peft.PeftModel.from_pretrained, and call patch_model."
        )


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """PEFT's config of the adapter in a folder.

    Raises:
        ValueError: the file is not JSON, or not what PEFT writes.
    """
    shape = {"base_model_name_or_path": str | None, "revision": str | None, "peft_type": str | None}
    return read_record(directory / "adapter_config.json", "Copy it again from where the adapter was saved.", shape)


def read_sidecar(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read `rope_patch.json` beside an adapter.

    Raises:
        FileNotFoundError: there is no such directory, or no such file in it.
        ValueError: the file has another format, or not the fields of `specification`.
    """
    path = Path(directory) / SIDECAR_NAME
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"there is no directory {directory}: name the one that the adapter was saved in. Download an adapter from "
            "the hub with huggingface_hub.snapshot_download."
        )
    if not path.is_file():
        require_no_named_adapters(path.parent)
        require_no_lost_sidecar(path.parent)
        raise FileNotFoundError(
            f"{path} does not exist: this adapter was not saved from a model patched by rope_patch, so its RoPE is not "
            "known. Load it with peft.PeftModel.from_pretrained, and call patch_model if you know the RoPE."
        )
    specification = read_record(path, "Copy it again from where the adapter was saved.", _SHAPE)
    if specification["format"] != _FORMAT:
        raise ValueError(f"{path} must have format {_FORMAT}, got {specification['format']}. Update rope-patch.")
    try:
        rescalings_of(specification)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return specification


def require_no_named_adapters(directory: Path) -> None:
    """Raise FileNotFoundError if the directory has adapters in subfolders, one per adapter name."""
    named = sorted(path.parent.name for path in directory.glob(f"*/{SIDECAR_NAME}"))
    if named and not (directory / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"{directory} holds adapters by name, each in its own folder: {', '.join(named)}. Name the folder of one, "
            f"e.g. {directory / named[0]}."
        )


def rescalings_of(specification: dict[str, Any]) -> list[Rescaling]:
    """The rescalings of a specification, in the order in which they are applied.

    Raises:
        ValueError: an entry is not a rescaling, e.g. the name of a view, or has wrong options.
    """
    return [resolve_rescaling(entry["method"], entry["options"]) for entry in specification["rescalings"]]


def always_view_of(specification: dict[str, Any]) -> tuple[View, int] | None:
    """The view with when="always", which also changes inference, and its seed; None if there is none.

    Raises:
        ValueError: the options of the view are not recorded.
    """
    view = specification["view"]
    if view is None or view["when"] != "always":
        return None
    if view.get("options") is None:
        raise ValueError(
            f"the adapter was saved with {view['repr']} in force in inference too, and the options of that view are "
            'not recorded. Set "view" to null in the file, load the adapter, and call patch_model(model, view, '
            "when='always') with that view."
        )
    return resolve_view(view["method"], view["options"]), view.get("seed", 0)


def _options_of(view: View) -> dict[str, Any] | None:
    """The options of a view as JSON values; None if an equal view cannot be made from them."""
    try:
        options = json.loads(json.dumps(view.options()))
        return options if resolve_view(view.name, options) == view else None
    except (TypeError, ValueError):
        return None


def require_rope_of_adapter(directory: Path, state: "RopeState") -> None:
    """Raise ValueError if the adapter in `directory` was trained with other RoPE parameters than a model has.

    FileNotFoundError means that its `rope_patch.json` is lost. An adapter that was saved without the file passes, with
    a warning if the model is rescaled; a path that is no adapter folder passes too.
    """
    if not (directory / "adapter_config.json").is_file():
        return
    if not (directory / SIDECAR_NAME).is_file():
        require_no_lost_sidecar(directory)
        if state.rescalings:
            logger.warning_once(  # the check runs several times in one load
                f"The adapter in {directory} has no {SIDECAR_NAME}, so its RoPE is not known: it runs with the RoPE of "
                f"this model, which is rescaled ({', '.join(map(str, state.rescalings))})."
            )
        return
    saved, in_force = read_sidecar(directory), specification(state)
    with_adapter, with_model = (
        with_factors(s["rope_parameters"], s["max_position_embeddings"]) for s in (saved, in_force)
    )
    if with_adapter != with_model:
        raise ValueError(
            f"the adapter in {directory} was trained with RoPE {_shown([saved['rope_parameters']])}, and this model "
            f"has {_shown([in_force['rope_parameters']])}, which all of its adapters share. Load it on a "
            "separate base model with rope_patch.load_adapter, or call patch_model with its rescaling before."
        )


def require_same_rope(model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
    """Raise ValueError if the adapter or model saved in `checkpoint` has other RoPE parameters than `model`.

    Its weights would load without an error, but belong to another model. A checkpoint without RoPE parameters passes.
    """
    sidecar, config = Path(checkpoint) / SIDECAR_NAME, Path(checkpoint) / "config.json"
    causal_lm_config: Any = find_causal_lm(model).config
    if sidecar.is_file():
        saved = [read_sidecar(checkpoint)["rope_parameters"]]
        in_force = [json.loads(json.dumps(find_decoder(model).config.rope_parameters))]
    elif config.is_file():
        saved = _rope_parameters_in(read_record(config, "Resume from another checkpoint."))
        in_force = _rope_parameters_in(json.loads(causal_lm_config.to_json_string()))  # as `save_pretrained` writes it
    else:
        return
    if saved != in_force:
        raise ValueError(
            f"{checkpoint} was trained with RoPE {_shown(saved)}, and this model has {_shown(in_force)}. Give the "
            "rescaling that it was trained with, or start a new run in another output_dir."
        )


def _rope_parameters_in(config: dict[str, Any]) -> list[Any]:
    """Every `rope_parameters` in a config and the configs within it."""
    found = [config["rope_parameters"]] if "rope_parameters" in config else []
    nested = [value for name, value in config.items() if isinstance(value, dict) and name != "rope_parameters"]
    return found + [entry for nested_config in nested for entry in _rope_parameters_in(nested_config)]


def _shown(parameter_sets: list[Any]) -> str:
    return ", ".join(map(str, parameter_sets)) or "by default"
