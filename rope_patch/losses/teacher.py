"""The teacher of a distillation: the pretrained model, as the same weights without adapters or as a frozen copy."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..adapters.watch import adapter_configs
from ..families.capabilities import is_noisy
from ..patch import native_rope, rope_view, unpatch_model
from ..rescalings.in_place import RopeParameters, restored_to_float32
from ..rope.rotary import find_causal_lm, find_decoder
from .forward_loss import refuse_prompts

# PEFT's initialisations of LoRA that subtract the new adapter from the base weights, or quantise these
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class SharedTeacher:
    """The student's own weights with adapters off, native RoPE and true positions, without a second copy.

    Args:
        model: a model with adapters (LoRA, QLoRA), of which nothing else is trained.

    Raises:
        ValueError: other parameters than adapters are trained, so that the teacher would change; or adapters are
            merged, learn prompts, or changed the base weights when they were made (PiSSA and similar).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        refuse_prompts(model)
        for name, config in adapter_configs(model).items():
            init = getattr(config, "init_lora_weights", None)
            if isinstance(init, str) and init.lower().startswith(_CHANGE_THE_BASE):
                raise ValueError(
                    f"adapter {name!r}: init_lora_weights={init!r} changes the base weights, so that with adapters off "
                    "the model is not the pretrained one, which should be the teacher. Use init_lora_weights=True, "
                    "'gaussian', 'orthogonal' or 'eva', which do not change them."
                )
        self._layers = adapter_layers(model)
        self._require_unmerged()
        added = {id(p) for layer in self._layers for p in _added_by(layer)}
        others = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in added]
        if not self._layers or others:
            wrong = (
                f"{others[0]} and {len(others) - 1} more are trained too: freeze them, biases by bias='none' in the "
                "adapter config"
                if self._layers
                else "this model has none"
            )
            raise ValueError(f"a teacher in the same weights needs adapters, and nothing else trained; {wrong}.")

    @contextmanager
    def ready(self) -> Iterator[Any]:
        """The decoder as the teacher, for forwards inside the block."""
        self._require_unmerged()
        decoder = find_decoder(self.model)
        were_off = [layer._disable_adapters for layer in self._layers]
        # eval mode for these modules alone: the others keep their mode, and so gradient checkpointing
        noisy = [m for m in decoder.modules() if m.training and is_noisy(m)]
        with native_rope(self.model), rope_view(self.model, "standard"):
            try:
                for module in noisy:
                    module.training = False
                # not PEFT's disable_adapter: it walks through the model each time, unfreezes frozen adapters
                # (https://github.com/huggingface/peft/issues/3447), and fails under FSDP1 (#1442)
                for layer in self._layers:
                    layer._disable_adapters = True
                yield decoder
            finally:
                for layer, was_off in zip(self._layers, were_off, strict=True):
                    layer._disable_adapters = was_off
                for module in noisy:
                    module.training = True

    def _require_unmerged(self) -> None:
        if any(getattr(layer, "merged", False) for layer in self._layers):
            raise ValueError(
                "adapters are merged into the weights, so they cannot be switched off for the teacher: call "
                "unmerge_adapter first."
            )

    @property
    def head(self) -> Any:
        """The pretrained output head, also if PEFT trains a copy of it (`modules_to_save`)."""
        head = find_causal_lm(self.model).get_output_embeddings()
        return getattr(head, "original_module", head)


class OtherTeacher:
    """Another model, with the RoPE and the positions that it has.

    Args:
        model: a causal LM in evaluation mode, bare or wrapped.

    Raises:
        ValueError: it is in training mode, where dropout would teach noise.
    """

    def __init__(self, model: nn.Module) -> None:
        if model.training:
            raise ValueError("the teacher must be in evaluation mode, got one in training mode: call teacher.eval().")
        self.copy: Any = find_causal_lm(model)

    @contextmanager
    def ready(self) -> Iterator[Any]:
        """The decoder, for forwards inside the block."""
        yield find_decoder(self.copy)

    @property
    def head(self) -> Any:
        """The output head."""
        return self.copy.get_output_embeddings()


class CopiedTeacher(OtherTeacher):
    """A frozen copy with native RoPE, for training that changes the base weights.

    Each rank has a whole copy, or a part of one (`shard`).

    Args:
        model: the student before training, patched or not.
        offload: whether the copy is on the CPU between steps.

    Raises:
        ValueError: the model has adapters, which the copy would have too.
    """

    def __init__(self, model: nn.Module, offload: bool = False) -> None:
        if adapter_layers(model):
            raise ValueError(
                "a copy of a model with adapters is not the pretrained model: use SharedTeacher, which switches them "
                "off, or call merge_and_unload to make the adapted model the teacher."
            )
        self.student: Any = find_causal_lm(model)
        self.offload = offload
        super().__init__(unpatch_model(_deepcopy(self.student)).requires_grad_(False).eval())
        decoder = find_decoder(self.copy)
        # a cast of the model before the patch may have rounded the frequencies
        restored_to_float32(RopeParameters.of(decoder), decoder).write_modules(decoder)
        if offload:
            self.copy.to("cpu")

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the weights to the dtype of an engine that runs without autocast; frequencies stay float32."""
        for parameter in self.copy.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def shard(self) -> None:
        """Shard the copy over all ranks by FSDP2; a forward gathers one layer after the other.

        Raises:
            ValueError: the copy is on the CPU between steps, which needs it whole.
        """
        if self.offload:
            raise ValueError("teacher_offload=True needs a whole copy on each rank: leave it out to shard the copy.")
        from torch.distributed.fsdp import fully_shard

        decoder: Any = find_decoder(self.copy)
        head = self.copy.get_output_embeddings()
        embeddings = self.copy.get_input_embeddings()
        is_tied = head.weight is embeddings.weight
        self.copy.to(next(self.student.parameters()).device)
        # not the decoder itself: FSDP2 changes its class, and Transformers records by class which states it can return
        others = [module for module in decoder.children() if module is not decoder.layers]
        for module in (*decoder.layers, *others, *([] if is_tied else [head])):
            if any(True for _ in module.parameters()):
                fully_shard(module, reshard_after_forward=True)
        if is_tied:  # FSDP2 has untied them
            head.weight = embeddings.weight

    @contextmanager
    def ready(self) -> Iterator[Any]:
        """The copy's decoder, for forwards inside the block."""
        self.copy.to(next(self.student.parameters()).device)
        try:
            yield find_decoder(self.copy)
        finally:
            if self.offload:
                self.copy.to("cpu")


def _deepcopy(causal_lm: nn.Module) -> Any:
    """A deep copy; weights that DeepSpeed ZeRO-3 has partitioned are gathered one after the other."""
    whole: dict[int, Any] = {}
    for parameter in causal_lm.parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters(parameter):
                whole[id(parameter)] = nn.Parameter(parameter.detach().clone())
    return copy.deepcopy(causal_lm, whole)


def adapter_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers that add to the model's own and can be switched off."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        return []
    return [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _added_by(layer: nn.Module) -> list[nn.Parameter]:
    """Parameters that one of `adapter_layers` adds; layers for weights of experts may be nested in one another."""
    base = getattr(layer, "base_layer", None)
    below = set() if base is None else {id(p) for p in base.parameters()}
    return [p for p in layer.parameters() if id(p) not in below]
