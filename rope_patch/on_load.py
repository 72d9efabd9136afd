"""Patch each model that a program loads by name, for programs that have no line between loading and training."""

import copy
import functools
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .adapters.loads import require_rope_of_load
from .forward.state import When, state_of
from .patch import checked_method, patch_model, restore_query_scale
from .rescalings import Rescaling
from .rope.rotary import find_decoder
from .views import View

logger = logging.get_logger(__name__)


@dataclass(eq=False)
class _Patch:
    """The arguments of one `patch_on_load` that is in force, and the RoPE of each model that it has patched."""

    method: View | Rescaling
    seed: int
    when: When
    ropes: list[Any] = field(default_factory=list)


_PATCHES: list[_Patch] = []  # in force, oldest first


def patch_on_load(method: str | View | Rescaling, *, seed: int = 0, when: When = "train", **options: Any) -> ExitStack:
    """Patch each causal LM that `from_pretrained` returns from now on in this process, as `patch_model` would.

    For programs that load a model by name and train it at once: TRL's scripts, LLaMA-Factory, ms-swift, Lightning
    scripts. The call wraps `PreTrainedModel.from_pretrained`, which every class of Transformers goes through, Auto
    classes and pipelines too. All causal LMs are patched, so a teacher or reference that the program loads by name is
    rescaled as well. Several calls add up as those of `patch_model` do: a rescaling and a view are both applied. A
    checkpoint that the program saves and loads again in the same process is not rescaled again.

    Models that generate no text from their own decoder, such as encoders, classifiers and reward models, are left
    alone with a warning, because programs load them beside the model that they train. A causal LM that `patch_model`
    refuses raises, because the program would train it unpatched.

    Args:
        method: a name from `list_methods()`, or an instance such as `Skip(skip=Uniform(1, 4096))`.
        seed: of a view's draws.
        when: "train" samples a view only while the model is in training mode, "always" in every forward.
        **options: arguments of the method, if it is given by name.

    Returns:
        The undo: leave it alone for the rest of the process, `close()` it, or use it in a `with`. Models that were
        patched stay patched. It warns if it has patched none.

    Raises:
        ValueError: unknown method or option, or an option out of its range. `from_pretrained` raises what
            `patch_model` does, and for an adapter that was trained with other RoPE parameters.
    """
    patch = _Patch(checked_method(method, options, seed=seed, when=when), seed, when)
    if not _PATCHES:
        _wrap()
    _PATCHES.append(patch)
    undo = ExitStack()
    undo.callback(_end, patch)
    return undo


def _end(patch: _Patch) -> None:
    _PATCHES.remove(patch)
    now = vars(PreTrainedModel)["from_pretrained"]
    # another library may have wrapped ours since: it stays then, and patches nothing
    if not _PATCHES and isinstance(now, _FromPretrained):
        PreTrainedModel.from_pretrained = now.original  # type: ignore[method-assign]
    if not patch.ropes:
        logger.warning(
            f"patch_on_load({patch.method.name!r}) has patched no model: none was loaded by from_pretrained after the "
            "call. Call it before the program loads its model, or patch the loaded model with patch_model."
        )


class _FromPretrained(classmethod):
    """`PreTrainedModel.from_pretrained` with what `_PATCHES` holds when it returns; `original` is what it replaces."""

    original: Any


def _wrap() -> None:
    original = vars(PreTrainedModel)["from_pretrained"]

    @functools.wraps(original.__func__)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        loaded = original.__func__(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
        if _PATCHES:
            _patch_loaded(model, tuple(_PATCHES), *args, **kwargs)
        return loaded

    wrapped = _FromPretrained(from_pretrained)
    wrapped.original = original
    PreTrainedModel.from_pretrained = wrapped  # type: ignore[method-assign, assignment]


def _patch_loaded(
    model: PreTrainedModel, patches: tuple[_Patch, ...], name: Any = None, *_: Any, **kwargs: Any
) -> None:
    """Apply `patches` to a model that `from_pretrained` has loaded with these arguments."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        logger.warning_once(
            f"{type(model).__name__} was loaded and is not patched: patch_on_load patches models that generate text "
            "from their own decoder. If it is the one to train, patch it with patch_model."
        )
        return
    rescalings = [patch for patch in patches if isinstance(patch.method, Rescaling)]
    decoder = find_decoder(restore_query_scale(model))
    # what was patched here, saved and is loaded again is rescaled already: `pi` twice would be a factor of 16 for 4
    is_own = any(_rope_of(decoder) in patch.ropes for patch in rescalings)
    for patch in patches:
        if not (is_own and patch in rescalings):
            patch_model(model, patch.method, seed=patch.seed, when=patch.when)
    for patch in patches:
        patch.ropes.append(_rope_of(decoder))
    state = state_of(decoder)
    if state is not None and getattr(model, "_hf_peft_config_loaded", False):  # the adapter came before the patch
        adapter_kwargs = kwargs.get("adapter_kwargs") or {}
        folder = adapter_kwargs.get("_adapter_model_path") or kwargs.get("pretrained_model_name_or_path", name)
        require_rope_of_load(folder, {**kwargs, **adapter_kwargs}, state)


def _rope_of(decoder: Any) -> Any:
    """What a checkpoint says of its RoPE."""
    return copy.deepcopy((decoder.config.rope_parameters, getattr(decoder.config, "max_position_embeddings", None)))
