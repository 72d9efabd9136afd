"""An adapter does not record RoPE: what it was trained with is written beside it, and put back when it is loaded.

`adapter_config.json` has no key for it, so a plain reload on the base model silently gives another model.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .rotary import find_core, find_decoder
from .version import __version__

if TYPE_CHECKING:
    from .state import RopeState

SIDECAR_NAME = "rope_patch.json"
_FORMAT = 1
_STACKED = 2  # of several rescalings, which a version that knows format 1 alone would load as the last one


def specification(state: "RopeState") -> dict[str, Any]:
    """What an adapter of this model needs to know about RoPE, as JSON values."""
    sampled = state.ended if state.source is None else (state.source.view, state.when)
    rescalings = [{"method": one.name, "options": one.options()} for one in state.rescalings]
    return {
        "format": _STACKED if rescalings[1:] else _FORMAT,
        "rescaling": rescalings[-1] if rescalings else None,
        **({"rescalings": rescalings} if rescalings[1:] else {}),
        "view": None if sampled is None else {"method": sampled[0].name, "repr": repr(sampled[0]), "when": sampled[1]},
        "rope_parameters": state.current.rope_parameters,
        "max_position_embeddings": state.current.max_position_embeddings,
        "native_rope_parameters": state.native.rope_parameters,
        "native_max_position_embeddings": state.native.max_position_embeddings,
        "rope_patch_version": __version__,
    }


class _SaveWithSidecar:
    """Stands in for `save_pretrained` of one `PeftConfig`, which PEFT calls with the folder of its adapter."""

    def __init__(self, peft_config: Any, state: "RopeState") -> None:
        self.peft_config = peft_config
        self.state = state

    def __call__(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        type(self.peft_config).save_pretrained(self.peft_config, save_directory, **kwargs)
        text = json.dumps(specification(self.state), indent=2, sort_keys=True)
        (Path(save_directory) / SIDECAR_NAME).write_text(text + "\n", encoding="utf-8")


class AdapterWatch:
    """Forward pre-hook of a decoder: finds adapters that were added after the patch to the model around it.

    Not a hook of that model, whose `forward` some of PEFT's methods (AdaLoRA) call past its hooks.
    """

    def __init__(self, core: nn.Module, state: "RopeState") -> None:
        self.core, self.state = core, state

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            _cover(self.core, self.state)


def watch_adapters(model: nn.Module, core: nn.Module, state: "RopeState") -> None:
    """Let every adapter on `model` write the sidecar when it is saved, also one that is added later."""
    for module in model.modules():
        _cover(module, state)
    decoder = find_decoder(core)
    if not any(isinstance(hook, AdapterWatch) for hook in decoder._forward_pre_hooks.values()):
        decoder.register_forward_pre_hook(AdapterWatch(core, state))


def forget_adapters(model: nn.Module, core: nn.Module) -> None:
    """Undo `watch_adapters`."""
    hooks = find_decoder(core)._forward_pre_hooks
    for handle in [h for h, hook in hooks.items() if isinstance(hook, AdapterWatch)]:
        del hooks[handle]
    for module in model.modules():
        for peft_config in _adapter_configs(module):
            if isinstance(vars(peft_config).get("save_pretrained"), _SaveWithSidecar):
                del peft_config.save_pretrained


def _cover(module: nn.Module, state: "RopeState") -> None:
    for peft_config in _adapter_configs(module):
        if not isinstance(vars(peft_config).get("save_pretrained"), _SaveWithSidecar):
            peft_config.save_pretrained = _SaveWithSidecar(peft_config, state)


def _adapter_configs(module: nn.Module) -> list[Any]:
    """PEFT leaves the adapters' configs on its wrapper and on the model that it wraps."""
    configs = vars(module).get("peft_config")
    return list(configs.values()) if isinstance(configs, dict) else []


def read_sidecar(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The specification beside an adapter.

    Raises:
        FileNotFoundError: there is no such directory, or no specification in it.
        ValueError: it is of another format.
    """
    path = Path(directory) / SIDECAR_NAME
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"there is no directory {directory}: name the one that the adapter was saved in. One that is on the hub "
            "is downloaded with huggingface_hub.snapshot_download."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: this adapter was not saved from a model patched by rope_patch, so what RoPE "
            "it was trained with is not known. Load it with peft.PeftModel.from_pretrained, and call patch_model if "
            "you know it."
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("format") not in (_FORMAT, _STACKED):
        raise ValueError(
            f"{path} must be of format {_FORMAT} or {_STACKED}, got {found!r:.200}. Update rope-patch to read it."
        )
    return found


def rescalings_of(specification: dict[str, Any]) -> list[dict[str, Any]]:
    """Method and options of each rescaling of a specification, in the order in which they are applied."""
    last = specification["rescaling"]
    return specification["rescalings"] if specification["format"] == _STACKED else [last] if last else []


def require_same_rope(model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
    """Raise ValueError if what is saved in `checkpoint`, adapter or whole model, has another schedule than `model`.

    Its weights would load without an error and be those of another model. A checkpoint that says nothing passes.
    """
    sidecar, config = Path(checkpoint) / SIDECAR_NAME, Path(checkpoint) / "config.json"
    own: Any = find_core(model).config
    if sidecar.is_file():
        saved = [read_sidecar(checkpoint)["rope_parameters"]]
        found = [json.loads(json.dumps(find_decoder(model).config.rope_parameters))]
    elif config.is_file():
        saved = _schedules(json.loads(config.read_text(encoding="utf-8")))
        found = _schedules(json.loads(own.to_json_string()))  # as `save_pretrained` writes it
    else:
        return
    if saved != found:
        raise ValueError(
            f"{checkpoint} was trained with RoPE {_shown(saved)}, and this model has {_shown(found)}. Give the "
            "rescaling that it was trained with, or begin anew in another output_dir."
        )


def _schedules(config: dict[str, Any]) -> list[Any]:
    """Every `rope_parameters` in a config and the configs within it."""
    own = [config["rope_parameters"]] if "rope_parameters" in config else []
    nested = [value for name, value in config.items() if isinstance(value, dict) and name != "rope_parameters"]
    return own + [schedule for one in nested for schedule in _schedules(one)]


def _shown(schedules: list[Any]) -> str:
    return ", ".join(map(str, schedules)) or "by default"
