"""Find out whether a forward belongs to `generate` or to a trainer; keep a trainer's reference model in step."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..base.call_stack import frames
from ..rescalings.in_place import RopeParameters
from ..rope.rotary import find_decoder
from .state import RopeState

_CHECKED = "_rope_patch_reference_checked"  # set on a trainer whose ref_model has been checked


def reference_of(trainer: Any) -> Any:
    """The decoder of a trainer's `ref_model`, None if it has none."""
    reference = getattr(trainer, "ref_model", None)
    return find_decoder(reference) if isinstance(reference, nn.Module) else None


def give_rope_to_reference(trainer: Any, decoder: Any, state: RopeState, patch: Callable[..., Any]) -> None:
    """Once a trainer, rescale the `ref_model` that it loaded by name as its model is rescaled.

    Args:
        trainer: in whose training or evaluation a forward of the model is in flight.
        decoder: of the model.
        state: of the decoder.
        patch: `patch_model`.

    Raises:
        ValueError: the `ref_model` has other frequencies for another reason or was already read, or vLLM samples
            replies from the model as it is saved.
    """
    if getattr(trainer, _CHECKED, False) or find_decoder(trainer.model) is not decoder:
        return
    if state.rescalings and getattr(trainer.args, "use_vllm", False):
        raise ValueError(
            "use_vllm=True samples replies from the checkpoint that vLLM loads by name, without the rescaling of this "
            "model: save the rescaled model with save_pretrained, and train the saved one."
        )
    reference = reference_of(trainer)
    if reference is not None and reference is not decoder:
        model_rope, reference_rope = RopeParameters.of(decoder), RopeParameters.of(reference)
        if not _alike(model_rope, reference_rope):
            was_read = getattr(trainer.args, "precompute_ref_log_probs", False)
            if state.start_rescalings or was_read or not _alike(state.native, reference_rope):
                raise ValueError(
                    "ref_model must have the RoPE frequencies that training begins with: model has "
                    f"{model_rope.rope_parameters}, ref_model {reference_rope.rope_parameters}. Give it those of the "
                    "model before training, as in patch_model(trainer.ref_model, 'yarn', factor=...), or train "
                    "adapters, whose reference is the model itself."
                )
            patch(trainer.ref_model, state.rescaling)
    setattr(trainer, _CHECKED, True)


def _alike(parameters: RopeParameters, other: RopeParameters) -> bool:
    if parameters.rotary.keys() != other.rotary.keys():
        return False
    for name, module in parameters.rotary.items():
        other_module = other.rotary[name]
        if module.buffers.keys() != other_module.buffers.keys():
            return False
        for buffer, (value, _) in module.buffers.items():
            against = other_module.buffers[buffer][0].to(value)
            # one of the two may have been rounded to 16 bits
            if value.shape != against.shape or not torch.allclose(value, against, rtol=1e-2, atol=0.0):
                return False
        scales = [state.attributes.get("attention_scaling") for state in (module, other_module)]
        if scales[0] != scales[1]:
            return False
    return True


def is_generating(cache: Any) -> bool:
    """Whether a forward belongs to `generate`, which trainers also call in training mode; no view is sampled there.

    A reply is sampled token by token, and a view would draw anew for each prefix of it.
    """
    if torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():  # a graph does not see its caller; `generate` compiles forwards with a cache
        return cache is not None
    files = (frame.f_code.co_filename for frame in frames() if frame.f_code.co_name == "generate")
    return any(file.replace("\\", "/").endswith("transformers/generation/utils.py") for file in files)


def running_trainer(*methods: str) -> Any:
    """The Trainer that is running one of these methods around this forward, None if there is none."""
    module = sys.modules.get("transformers.trainer")
    if module is None:
        return None
    callers = (frame.f_locals.get("self") for frame in frames() if frame.f_code.co_name in methods)
    return next((caller for caller in callers if isinstance(caller, module.Trainer)), None)
