"""Whose forward it is: of `generate`, of a trainer that drives the view, or of one that does not know of it."""

import sys
from types import CodeType
from typing import Any

import torch
from torch import nn

from .call_stack import frames
from .rescale import RopeParameters
from .rotary import find_decoder
from .state import RopeState

CLOCK_ATTRIBUTE = "_rope_patch_clock"  # on a trainer: number of the callback that sets the clock
_VETTED = "_rope_patch_vetted"  # on a trainer: its ref_model has the RoPE of its model


def reference_of(trainer: Any) -> Any:
    """The decoder of a trainer's `ref_model`, None if it has none of its own."""
    reference = getattr(trainer, "ref_model", None)
    return find_decoder(reference) if isinstance(reference, nn.Module) else None


def require_same_rope_as_reference(trainer: Any, decoder: Any) -> None:
    """Raise if a `ref_model` has other frequencies than the model: it is not the model that training began with."""
    reference = reference_of(trainer)
    if reference is None or reference is decoder:
        return
    of_model, of_reference = RopeParameters.of(decoder), RopeParameters.of(reference)
    if not _alike(of_model, of_reference):
        raise ValueError(
            "ref_model has other RoPE frequencies than model, as one that the trainer loads by name lacks the "
            f"rescaling, and the loss would not begin where it should: model has {of_model.rope_parameters}, ref_model "
            f"{of_reference.rope_parameters}. Rescale it, too, before training, as in patch_model(trainer.ref_model, "
            "'yarn', factor=...), or train adapters, whose reference is the model itself."
        )


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
    """Whether a forward is one of `generate`, which trainers also call in training mode: it samples no view there.

    A reply is sampled token by token, from prefixes that a view would draw for one by one.
    """
    if torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():  # the call is out of sight in a graph; `generate` compiles forwards with a cache
        return cache is not None
    return any(_is_generate(frame.f_code) for frame in frames())


def _is_generate(code: CodeType) -> bool:
    path = code.co_filename.replace("\\", "/")
    return code.co_name == "generate" and path.endswith("transformers/generation/utils.py")


def _driving_trainer() -> Any:
    """The Trainer whose training step the forward in flight belongs to, None if there is none."""
    module = sys.modules.get("transformers.trainer")
    if module is None:
        return None
    code = module.Trainer.training_step.__code__  # whose frame holds on to nothing for long, once it is looked into
    return next((frame.f_locals["self"] for frame in frames() if frame.f_code is code), None)


@torch.compiler.disable
def require_driver(state: RopeState) -> None:
    """Raise if nobody tells a view in training what to draw for, or if a trainer's reference lacks the rescaling.

    Raises:
        ValueError: the forward is one of a trainer that does not set the view's clock, or of several ranks whose clocks
            nobody sets, which would all draw alike; or `ref_model` has other frequencies.
    """
    if state.leader is not None:
        return
    source = state.source if state.source is not None and state.source.view.perturbs else None
    if source is not None and source.clock.is_set and source.clock.driver is None:
        return  # RopeSFTTrainer, or a loop that sets it
    trainer = _driving_trainer()
    if trainer is None:
        if source is not None and not source.clock.is_set and _ranks() > 1:
            raise ValueError(
                f"all {_ranks()} ranks would draw alike from {source.view!r}, and nobody has set its clock: call "
                "rope_patch.patch.view_source(model).clock.set_step(step) before each step, or clock.set(step, "
                "first_sample) before each forward, where first_sample counts the documents of the step over all ranks."
            )
        return
    if source is not None and (
        not source.clock.is_set or getattr(trainer, CLOCK_ATTRIBUTE, None) != source.clock.driver
    ):
        raise ValueError(
            f"{type(trainer).__name__} trains a model with {source.view!r} and does not tell the view which step it "
            "is: ranks would draw alike, a resumed run would begin with the first draws again, and policy and "
            "reference would draw apart. Call trainer.add_callback(rope_patch.RopeViewCallback(trainer)) before "
            "trainer.train(), or use trl_ext.RopeSFTTrainer."
        )
    if not getattr(trainer, _VETTED, False):
        if reference_of(trainer) is not None:
            require_same_rope_as_reference(trainer, find_decoder(trainer.model))
        if state.rescalings and getattr(trainer.args, "use_vllm", False):
            raise ValueError(
                "use_vllm=True samples replies from a model that vLLM loads by its name, without the rescaling that "
                "this one has: save the rescaled model with save_pretrained, and train the saved one."
            )
        setattr(trainer, _VETTED, True)


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
