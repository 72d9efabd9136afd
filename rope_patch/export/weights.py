"""The weights that a model computes with, one tensor after the other: adapters merged, quantised weights dequantised.

The model is not changed, and memory holds no more than one merged or dequantised tensor.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ..adapters.watch import adapter_configs

_WRAPPERS = ("base_layer", "_orig_mod", "_checkpoint_wrapped_module")
_BNB = ("Params4bit", "Int8Params")  # bitsandbytes' quantised weights
# PEFT's layers whose `get_delta_weight` is added to a quantised weight; HiRA multiplies by its matrix
_ADDING = ("LoraLayer", "VeraLayer", "PveraLayer", "RandLoraLayer")


def plain_name(name: str) -> str:
    """A module's name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of PEFT around a layer of the model."""
    return not _class_names(module).isdisjoint(("BaseTunerLayer", "AuxiliaryTrainingWrapper"))


def require_exportable(model: nn.Module, causal_lm: Any) -> None:
    """Raise ValueError unless every weight of `causal_lm` is on this machine and can be merged or dequantised."""
    for name, config in adapter_configs(model).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} is prompt learning ({config.peft_type.value}), which no weight can hold: serve it "
                "with PEFT."
            )
    quantizer = getattr(causal_lm, "hf_quantizer", None)
    method = "bitsandbytes" if quantizer is None else quantizer.quantization_config.quant_method
    if method != "bitsandbytes":
        raise ValueError(f"export cannot dequantise {method!s} weights: load the model without quantisation.")
    for name, parameter in causal_lm.named_parameters():
        if parameter.is_meta or hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{name} is not whole on this machine (offloaded, or a shard of FSDP or DeepSpeed): save the model or "
                "its adapter first, and export the folder."
            )


def final_weights(
    causal_lm: nn.Module, dtype: torch.dtype | None, tied: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight by its name in a model without adapters.

    Args:
        causal_lm: the outermost Transformers model.
        dtype: to cast all floating-point weights of a quantised model to; None leaves weights as they are.
        tied: names of weights that Transformers ties when it loads the model, such as input and output embeddings.
            Each such weight comes once. A weight that only this model shares between names comes under each.
    """
    seen: set[int] = set()
    for name, tensor in _of_module(causal_lm, ""):
        if isinstance(tensor, nn.Parameter):
            if id(tensor) in seen:
                if name in tied:
                    continue
                tensor = tensor.detach().clone()  # safetensors refuses one memory under two names
            seen.add(id(tensor))
        tensor = tensor.detach()
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _class_names(module: nn.Module) -> set[str]:
    """Names of a module's classes: PEFT, which has them, may not be installed."""
    return {kind.__name__ for kind in type(module).__mro__}


def _of_module(module: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if is_adapted(module):
        yield from _of_adapted(module, name)
        return
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield _join(name, key), _dequantised(module) if type(parameter).__name__ in _BNB else parameter
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield _join(name, key), buffer
    for child_name, child in module.named_children():
        yield from _of_module(child, plain_name(_join(name, child_name)))


def _of_adapted(module: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if "TrainableTokensWrapper" in _class_names(module):  # around a layer of PEFT that can be merged
        module = module.token_adapter
    kinds = _class_names(module)
    if "ModulesToSaveWrapper" in kinds:
        active = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.modules_to_save]
        yield from _of_module(module.modules_to_save[active[0]] if active else module.original_module, name)
        return
    # the merge of LNTuningLayer replaces the layer by another module
    mergeable = kinds.isdisjoint(("AuxiliaryTrainingWrapper", "LNTuningLayer"))
    if not mergeable or not hasattr(module.get_base_layer(), "weight"):
        raise ValueError(
            f"{name} is adapted by PEFT's {type(module).__name__}, which is not merged here: call "
            "model.merge_and_unload() first and export what it returns."
        )
    if module.disable_adapters and module.merged:  # the next forward would take them out of the weights first
        raise ValueError(
            f"{name} has adapters that are merged and switched off at once, so that its weight is not what it computes "
            "with: call model.unmerge_adapter() first."
        )
    base, active = module.get_base_layer(), []
    if not module.disable_adapters and not module.merged:
        tables = [getattr(module, table) for table in module.adapter_layer_names]
        active = [adapter for adapter in module.active_adapters if any(adapter in table for table in tables)]
    if not active:
        yield from _of_module(base, name)
    elif type(base.weight).__name__ in _BNB:
        yield from _merged_into_quantised(module, base, active, name)
    else:
        yield from _merged(module, base, active, name)


def _merged(module: Any, base: Any, active: list[str], name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge by PEFT's `merge` into a float32 copy in place of the weight, so that the sum is rounded once."""
    before = {key: parameter.data for key, parameter in base.named_parameters()}
    try:
        for key, parameter in base.named_parameters():
            parameter.data = before[key].to(torch.float32, copy=True)
        module.merge(adapter_names=active)
        merged = {key: parameter.data for key, parameter in base.named_parameters()}
    finally:
        for key, parameter in base.named_parameters():
            parameter.data = before[key]
        module.merged_adapters.clear()  # in which `merge` has noted them
    for key, tensor in merged.items():
        yield _join(name, key), tensor.to(before[key].dtype)


def _merged_into_quantised(module: Any, base: Any, active: list[str], name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The dequantised weight plus scale * B A of each adapter, in float32. PEFT would quantise the sum again."""
    weight, bias = _dequantised(base).float(), base.bias
    for adapter in active:
        is_other_lora = adapter in getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(adapter)
        # AdaLoRA's layers are of LoRA's class and have no `get_delta_weight`
        if is_other_lora or not hasattr(module, "get_delta_weight") or _class_names(module).isdisjoint(_ADDING):
            raise ValueError(
                f"{name} is quantised, and adapter {adapter!r} does more than add a matrix to its weight, as LoRA does "
                "(but not DoRA), so it is not merged here: load the base model without quantisation and put the "
                "adapter on it, or serve it with PEFT."
            )
        weight += module.get_delta_weight(adapter).float().to(weight.device)
        if getattr(module, "lora_bias", {}).get(adapter):
            if bias is None:
                raise ValueError(
                    f"{name} has no bias, and adapter {adapter!r} was trained with lora_bias=True: serve it with PEFT."
                )
            bias = bias.float() + module.lora_B[adapter].bias.float() * module.scaling[adapter]
    yield _join(name, "weight"), weight
    if bias is not None:
        yield _join(name, "bias"), bias


def _dequantised(module: Any) -> torch.Tensor:
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    # a forward on a CPU reorders 4-bit weights, which `dequantize_bnb_weight` does not know; this undoes it
    module.state_dict()
    return dequantize_bnb_weight(module.weight, getattr(module, "state", None))


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
