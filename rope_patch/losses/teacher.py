"""The teacher of a distillation: the model as it was pretrained, in the same weights or in a frozen copy."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..adapters.watch import adapter_configs
from ..families.capabilities import is_noisy
from ..patch import native_rope, rope_view, unpatch_model
from ..rescalings.in_place import RopeParameters, restored_to_float32
from ..rope.rotary import find_causal_lm, find_decoder


class SharedTeacher:
    """The student's own weights with adapters off, native RoPE and true positions: no second copy.

    Args:
        model: a model with adapters (LoRA, QLoRA) and nothing else that is trained.

    Raises:
        ValueError: parameters beside adapters are trained, so that the teacher would move with the student; adapters
            are merged, have changed the base weights when they were made (PiSSA and its kin), or are prompts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        for name, config in adapter_configs(model).items():
            _require_base_as_it_was(name, config)
        self._switches = adapter_layers(model)
        self._require_unmerged()
        added = {id(p) for layer in self._switches for p in _added_by(layer)}
        others = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in added]
        if not self._switches or others:
            wrong = (
                f"{others[0]} and {len(others) - 1} more are trained too: freeze them, biases by bias='none' in the "
                "adapter config"
                if self._switches
                else "this model has none"
            )
            raise ValueError(f"a teacher in the same weights needs adapters, and nothing else trained; {wrong}.")

    @contextmanager
    def ready(self) -> Iterator[Any]:
        """The decoder as the teacher, for forwards inside the block."""
        self._require_unmerged()
        decoder = find_decoder(self.model)
        before = [layer._disable_adapters for layer in self._switches]
        with ExitStack() as stack:
            stack.enter_context(native_rope(self.model))
            stack.enter_context(rope_view(self.model, "standard"))
            stack.enter_context(_without_dropout(decoder))
            # not PEFT's disable_adapter: it unfreezes what was frozen, and walks the model each time
            for layer in self._switches:
                layer._disable_adapters = True
            try:
                yield decoder
            finally:
                for layer, was in zip(self._switches, before, strict=True):
                    layer._disable_adapters = was

    def _require_unmerged(self) -> None:
        if any(getattr(layer, "merged", False) for layer in self._switches):
            raise ValueError(
                "adapters are merged into the weights, so the teacher is gone: call unmerge_adapter first."
            )

    @property
    def head(self) -> Any:
        """The output head as it was pretrained, also where PEFT trains a copy of it (`modules_to_save`)."""
        head = find_causal_lm(self.model).get_output_embeddings()
        return getattr(head, "original_module", head)


class CopiedTeacher:
    """A frozen copy with native RoPE, for training that changes the weights themselves.

    It is whole on each rank, or in parts (`shard`).

    Args:
        model: the student before training, patched or not.
        offload: whether the copy waits on the CPU between steps.

    Raises:
        ValueError: the model has adapters, which would be the teacher's too.
    """

    def __init__(self, model: nn.Module, offload: bool = False) -> None:
        if adapter_layers(model):
            raise ValueError(
                "a copy of a model with adapters is not the model as it was pretrained: use SharedTeacher, which "
                "switches them off, or merge_and_unload them to begin from what they were trained to."
            )
        self.student: Any = find_causal_lm(model)
        self.offload = offload
        self.copy = unpatch_model(_deepcopy(self.student)).requires_grad_(False).eval()
        decoder = find_decoder(self.copy)
        # frequencies that a cast of the model had rounded before it was patched are not those of its pretraining
        restored_to_float32(RopeParameters.of(decoder), decoder).write_modules(decoder)
        if offload:
            self.copy.to("cpu")

    def cast(self, dtype: torch.dtype) -> None:
        """Hold weights in the dtype that an engine computes the student in without autocast; frequencies stay."""
        for parameter in self.copy.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def shard(self) -> None:
        """Hold the copy in parts on all ranks, by FSDP2: a forward gathers one layer after the other.

        Raises:
            ValueError: the copy waits on the CPU between steps, which needs it whole.
        """
        if self.offload:
            raise ValueError(
                "teacher_offload=True moves a whole copy to the CPU and back: leave it out to shard the copy."
            )
        from torch.distributed.fsdp import fully_shard

        decoder: Any = find_decoder(self.copy)
        head = self.copy.get_output_embeddings()
        embeddings = self.copy.get_input_embeddings()
        is_tied = head.weight is embeddings.weight
        self.copy.to(next(self.student.parameters()).device)
        # not the decoder itself: it would get another class, and Transformers keeps by class which states it may return
        others = [module for module in decoder.children() if module is not decoder.layers]
        for module in (*decoder.layers, *others, *([] if is_tied else [head])):
            if any(True for _ in module.parameters()):
                fully_shard(module, reshard_after_forward=True)
        if is_tied:  # which FSDP2 does not see
            head.weight = embeddings.weight

    @contextmanager
    def ready(self) -> Iterator[Any]:
        """The copy's decoder, for forwards inside the block."""
        # wrappers may have moved the student since
        self.copy.to(next(self.student.parameters()).device)
        try:
            yield find_decoder(self.copy)
        finally:
            if self.offload:
                self.copy.to("cpu")

    @property
    def head(self) -> Any:
        """The copy's output head."""
        return self.copy.get_output_embeddings()


def _deepcopy(causal_lm: nn.Module) -> Any:
    """A copy of its own; of weights that DeepSpeed ZeRO-3 has partitioned, gathered one after the other."""
    whole: dict[int, Any] = {}
    for parameter in causal_lm.parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters(parameter):
                whole[id(parameter)] = nn.Parameter(parameter.detach().clone())
    return copy.deepcopy(causal_lm, whole)


# of LoRA, by PEFT's names: the base weights get what the new adapter adds taken off, or are quantised
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _require_base_as_it_was(name: str, config: Any) -> None:
    """Raise ValueError if a model with this adapter off is not the model that was loaded."""
    if config.is_prompt_learning:
        raise ValueError(
            f"adapter {name!r} learns prompts ({config.peft_type.value}), which cannot be switched off for a teacher: "
            "use LoRA."
        )
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, str) and init.lower().startswith(_CHANGE_THE_BASE):
        raise ValueError(
            f"adapter {name!r}: init_lora_weights={init!r} changes the base weights, so that with adapters off the "
            "model is not the one that was pretrained, which the teacher is to be. Use init_lora_weights=True, "
            "'gaussian', 'orthogonal' or 'eva', which leave them."
        )


def adapter_layers(model: nn.Module) -> list[Any]:
    """Layers of PEFT that add something to the model's own, and can be switched off."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        return []
    return [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _added_by(layer: nn.Module) -> list[nn.Parameter]:
    """Parameters that one of `adapter_layers` adds; its base layer may hold the next one, as for weights of experts."""
    base = getattr(layer, "base_layer", None)
    below = set() if base is None else {id(p) for p in base.parameters()}
    return [p for p in layer.parameters() if id(p) not in below]


@contextmanager
def _without_dropout(decoder: nn.Module) -> Iterator[None]:
    """Eval mode for every module that draws something; the rest keeps its mode, and so its checkpointing."""
    active = [m for m in decoder.modules() if m.training and is_noisy(m)]
    for module in active:
        module.training = False
    try:
        yield
    finally:
        for module in active:
            module.training = True
