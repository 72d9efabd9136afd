"""Makes every adapter on a patched model write `rope_patch.json` when it is saved.

PEFT calls `save_pretrained` of the adapter's config. We cover that method of the instance, so that it also writes the
sidecar: when the model is patched, and whenever the decoder is asked for its modules. PEFT does so in each save, even
if it is passed the weights (DeepSpeed ZeRO-3), and then the wrappers around the decoder are on the stack. A whole model
that is saved with such weights gets a cover of its own `save_pretrained`, once its weights were asked for.

The model that is being saved is found on the Python stack. A prototype that only covered adapters when the model was
patched lost 64 sidecars in 209 tests: of adapters that were added later, that sat on wrappers we were not given, or
that were saved from gathered weights.
"""

import copy
import json
import os
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from ..base.call_stack import frames
from ..forward.config_checks import require_saved_rope
from ..forward.state import state_of
from ..rope.rotary import find_causal_lm, find_decoder
from .loads import require_rope_of_loads
from .sidecar import SIDECAR_NAME, mark_config, specification
from .weights import digest, digest_of_folder


class _SaveWithSidecar:
    """Replaces `save_pretrained` of one `PeftConfig`, which PEFT calls with the folder of its adapter.

    Args:
        peft_config: the config.
        causal_lm: the model with the config. It is held weakly: a strong reference would be a cycle, and keep the model
            in memory until garbage collection.
    """

    def __init__(self, peft_config: Any, causal_lm: nn.Module | None) -> None:
        self.peft_config = peft_config
        self.causal_lm = _weak(causal_lm)
        self.has_written = False

    def __call__(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        type(self.peft_config).save_pretrained(self.peft_config, save_directory, **kwargs)
        # several models may share a config: take the one that is being saved
        model = next((m for m in _callers() if hasattr(m, "peft_config")), None)
        owner = self.causal_lm() if model is None else model
        decoder = None if owner is None else find_decoder(find_causal_lm(owner))
        state = None if decoder is None else state_of(decoder)
        if owner is not None and state is not None and state.source is not None and state.source.view.perturbs:
            find_decoder(owner)  # raises for PEFT's Shadow, whose own decoder does not have the view
        path = Path(save_directory) / SIDECAR_NAME
        if state is None:
            path.unlink(missing_ok=True)  # may be left from an earlier save
            return
        if isinstance(model, PreTrainedModel):  # Transformers writes the weights after the config, PEFT before
            saved: Any = model
            weights = digest(saved.get_adapter_state_dict().values())
        else:
            weights = digest_of_folder(save_directory)
        text = json.dumps({**specification(state), "adapter_weights": weights}, indent=2, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")
        self.has_written = True
        if state.rescalings or (state.source is not None and state.source.view.perturbs and state.when == "always"):
            mark_config(path.parent)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SaveWithSidecar":
        causal_lm = self.causal_lm()
        other = type(self)(copy.deepcopy(self.peft_config, memo), memo.get(id(causal_lm), causal_lm))
        other.has_written = self.has_written
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "causal_lm": self.causal_lm()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.causal_lm = _weak(state["causal_lm"])


class _ModelMethod:
    """Base of replaced methods of one model. They refer to it weakly, and a copy of the model gets copies of them."""

    def __init__(self, causal_lm: nn.Module | None) -> None:
        self.causal_lm = _weak(causal_lm)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(memo.get(id(self.causal_lm()), self.causal_lm()))

    def __getstate__(self) -> dict[str, Any]:
        return {"causal_lm": self.causal_lm()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["causal_lm"])  # type: ignore[misc]


class _TraversalWatch(_ModelMethod):
    """Replaces `named_modules` of one decoder, to find the adapters and wrappers around it.

    PEFT walks through all modules of what it saves. If it is passed the weights, as under DeepSpeed ZeRO-3, nothing
    else of the save reaches the decoder. The walk is recursive, so modules around the decoder are on the stack. PEFT
    also walks through all modules before it loads an adapter, and the adapter's RoPE is checked here.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        decoder: Any = self.causal_lm()
        if decoder is None:
            raise ReferenceError("the model of this named_modules is gone: keep the model, and call its own method.")
        modules: Iterator[tuple[str, nn.Module]] = type(decoder).named_modules(decoder, *args, **kwargs)
        if torch.compiler.is_compiling():  # a traced forward asks for its dtype, and Dynamo cannot read the stack
            return modules
        around, gathers = _traversed()
        outermost = next((m for m in reversed(around) if isinstance(m, PreTrainedModel)), decoder)
        state = state_of(decoder)
        if state is not None:
            require_rope_of_loads(state)
        for module in around:
            _cover(module, outermost)
            is_model = isinstance(module, PreTrainedModel) and "save_pretrained" not in vars(module)
            # only if the weights are asked for: the replacement holds the model weakly, so that in
            # `patch_model(from_pretrained(...), ...).save_pretrained(folder)` the model would be gone before the call
            if is_model and gathers and state is not None and state.rescalings:
                module.save_pretrained = _CheckedSave(module)  # type: ignore[assignment]
        return modules


class _CheckedSave(_ModelMethod):
    """Replaces `save_pretrained` of one model, for saves with weights that were gathered elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.causal_lm()
        if model is None:
            raise ReferenceError("the model of this save_pretrained is gone: keep the model, and call its own method.")
        decoder = find_decoder(model)
        state = state_of(decoder)
        if state is not None:
            _cover(model, model)
            require_saved_rope(model, decoder, state)
            require_no_adapter_beside(model, kwargs["save_directory"] if "save_directory" in kwargs else args[0])
        return type(model).save_pretrained(model, *args, **kwargs)


class _SaveWatch:
    """Pre-hook of a decoder's `state_dict`: checks the model around it that is being saved.

    A module does not know its parents, so the model is found on the Python stack.
    """

    def __call__(self, decoder: Any, prefix: str, keep_vars: bool) -> None:
        around = [m for m in _callers() if isinstance(m, PreTrainedModel) and any(x is decoder for x in m.modules())]
        outermost = around[-1] if around else decoder
        state = state_of(decoder)
        if state is not None:
            require_saved_rope(outermost, decoder, state)
            for call in frames():
                if call.f_code.co_name == "save_pretrained" and call.f_locals.get("self") is outermost:
                    require_no_adapter_beside(call.f_locals["self"], call.f_locals["save_directory"])


def watch_adapters(model: nn.Module, causal_lm: nn.Module) -> None:
    """Make every adapter on `model` write the sidecar when it is saved, also an adapter that is added later.

    Adapters that are loaded later have their own sidecar checked.
    """
    for module in model.modules():
        _cover(module, causal_lm)
    decoder = find_decoder(causal_lm)
    if not any(isinstance(hook, _SaveWatch) for hook in decoder._state_dict_pre_hooks.values()):
        decoder.register_state_dict_pre_hook(_SaveWatch())
        decoder.named_modules = _TraversalWatch(decoder)  # type: ignore[method-assign]


def forget_adapters(model: nn.Module, causal_lm: nn.Module) -> None:
    """Undo `watch_adapters` in `model`; covers elsewhere write nothing for an unpatched model.

    A config that has written a sidecar stays covered: if it is saved to that folder again, without a rescaling, the old
    sidecar has to be deleted.
    """
    decoder = find_decoder(causal_lm)
    hooks = decoder._state_dict_pre_hooks
    for handle in [h for h, hook in hooks.items() if isinstance(hook, _SaveWatch)]:
        del hooks[handle]
    if isinstance(vars(decoder).get("named_modules"), _TraversalWatch):
        del decoder.named_modules
    for module in model.modules():
        if isinstance(vars(module).get("save_pretrained"), _CheckedSave):
            del module.save_pretrained
        for peft_config in _adapter_configs(module).values():
            cover = vars(peft_config).get("save_pretrained")
            if isinstance(cover, _SaveWithSidecar) and not cover.has_written:
                del peft_config.save_pretrained


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Name -> PEFT's config of each adapter on `model`, prompts included."""
    return {name: config for module in model.modules() for name, config in _adapter_configs(module).items()}


def require_no_adapter_beside(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Raise ValueError if whole weights would be saved into the folder of an adapter.

    Transformers applies an adapter that it finds beside weights, even to weights that it was merged into.
    """
    if not adapter_configs(model) and (Path(directory) / "adapter_config.json").is_file():
        raise ValueError(
            f"{directory} has an adapter, which Transformers would apply to this model's weights when it loads the "
            "folder, even if it was merged already: use another folder, or delete adapter_config.json there."
        )


def base_revision(model: nn.Module) -> str | None:
    """The hub revision of the base model in the adapters' configs; None if they name none, or several."""
    revisions = {getattr(config, "revision", None) for config in adapter_configs(model).values()}
    return revisions.pop() if len(revisions) == 1 else None


def require_no_decoder_in_adapters(causal_lm: nn.Module) -> None:
    """Raise ValueError if an adapter has its own decoder, which a patch of the model would not change."""
    for name, peft_config in _adapter_configs(causal_lm).items():
        if getattr(peft_config, "peft_type", None) == "SHADOW":
            raise ValueError(
                f"adapter {name!r} is PEFT's Shadow, whose own decoder keeps the RoPE that the model had when the "
                "adapter was made. Patch the model before get_peft_model, with a rescaling only, and unpatch it after "
                "model.unload()."
            )


def _cover(module: nn.Module, causal_lm: nn.Module) -> None:
    for peft_config in _adapter_configs(module).values():
        if not isinstance(vars(peft_config).get("save_pretrained"), _SaveWithSidecar):
            peft_config.save_pretrained = _SaveWithSidecar(peft_config, causal_lm)


def _adapter_configs(module: nn.Module) -> dict[str, Any]:
    """PEFT keeps the adapters' configs on its wrapper (another name for prompts) and on the model inside it."""
    for name in ("peft_config", "_peft_config"):
        configs = vars(module).get(name)
        if isinstance(configs, dict):
            return configs
    return {}


def _weak(causal_lm: nn.Module | None) -> Callable[[], nn.Module | None]:
    return (lambda: None) if causal_lm is None else weakref.ref(causal_lm)


def _callers() -> Iterator[nn.Module]:
    """Modules whose methods are being called, innermost first."""
    for frame in frames():
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module):
            yield caller


def _traversed() -> tuple[list[nn.Module], bool]:
    """Modules around a decoder whose `named_modules` is running, innermost first; and whether for `named_parameters`.

    Code that gathers weights to save them calls `named_parameters`. `parameters` is also called for a device or dtype,
    and PEFT calls `named_parameters` to freeze what it wraps, so neither counts.
    """
    calls = islice(frames(), 1, None)  # without the frame of the watch itself
    around: list[nn.Module] = []
    for frame in calls:
        if frame.f_code.co_name != "named_modules":
            callers = [frame, *islice(calls, 2)]
            names = [caller.f_code.co_name for caller in callers]
            by_peft = str(callers[-1].f_globals.get("__name__")).startswith("peft.")
            # torch: `parameters` calls `named_parameters`, that `_named_members`, and that `named_modules`
            by_name = names[:2] == ["_named_members", "named_parameters"] and names[2:] != ["parameters"]
            return around, by_name and not by_peft
        around.append(frame.f_locals["self"])
    return around, False
