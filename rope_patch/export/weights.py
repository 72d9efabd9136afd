"""The weights that a model computes with, one tensor after the other: adapters merged, quantised ones dequantised.

The model stays as it is, and no more than one merged or dequantised tensor is made at a time.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ..adapters.watch import adapter_configs

_WRAPPERS = ("base_layer", "_orig_mod", "_checkpoint_wrapped_module")
_BNB = ("Params4bit", "Int8Params")
# PEFT's layers whose `get_delta_weight` is added to a quantised weight; HiRA's is multiplied with it
_ADDING = ("LoraLayer", "VeraLayer", "PveraLayer", "RandLoraLayer")


def plain_name(name: str) -> str:
    """A module's name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's around a layer of the model."""
    return any(kind.__name__ in ("BaseTunerLayer", "AuxiliaryTrainingWrapper") for kind in type(module).__mro__)


def require_exportable(model: nn.Module, causal_lm: Any) -> None:
    """Raise ValueError unless every weight of `causal_lm` is here, and is one that can be merged or dequantised."""
    for name, config in adapter_configs(model).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} is prompt learning ({config.peft_type.value}), which no weight can hold: serve it "
                "with PEFT."
            )
    quantizer = getattr(causal_lm, "hf_quantizer", None)
    method = None if quantizer is None else quantizer.quantization_config.quant_method
    if method is not None and method != "bitsandbytes":
        raise ValueError(
            f"weights quantised by {method!s} are not dequantised here: load the model without quantisation."
        )
    for name, parameter in causal_lm.named_parameters():
        if parameter.is_meta or hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{name} is not whole on this machine (offloaded, or a shard of FSDP or DeepSpeed): save the model or "
                "its adapter first, and export the folder."
            )


def final_weights(
    causal_lm: nn.Module, dtype: torch.dtype | None, tied: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight by the name that it has without adapters.

    Args:
        causal_lm: the outermost Transformers model.
        dtype: of what is dequantised and of all beside it; None leaves weights as they are.
        tied: names that Transformers gives one weight when it loads the model, as of embeddings at both ends. Under
            these the weight comes once; one that the model has twice of its own accord comes twice.
    """
    seen: set[int] = set()
    for name, tensor in _of_module(causal_lm, ""):
        if isinstance(tensor, nn.Parameter):
            if id(tensor) in seen:
                if name in tied:
                    continue
                tensor = tensor.detach().clone()  # no file of safetensors holds one memory under two names
            seen.add(id(tensor))
        tensor = tensor.detach()
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _of_module(module: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if is_adapted(module):
        yield from _of_adapted(module, name)
        return
    for own, parameter in module._parameters.items():
        if parameter is not None:
            yield _join(name, own), _dequantised(module) if type(parameter).__name__ in _BNB else parameter
    for own, buffer in module._buffers.items():
        if buffer is not None and own not in module._non_persistent_buffers_set:
            yield _join(name, own), buffer
    for own, child in module.named_children():
        yield from _of_module(child, plain_name(_join(name, own)))


def _of_adapted(module: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "TrainableTokensWrapper" in kinds:  # PEFT's around a layer of its own that can be merged
        module = module.token_adapter
        kinds = {kind.__name__ for kind in type(module).__mro__}
    saved = "ModulesToSaveWrapper" in kinds
    swaps = "LNTuningLayer" in kinds  # its merge puts another module in place of the layer
    if not saved and ("AuxiliaryTrainingWrapper" in kinds or swaps or not hasattr(module.get_base_layer(), "weight")):
        raise ValueError(
            f"{name} is adapted by PEFT's {type(module).__name__}, which is not merged here: call "
            "model.merge_and_unload() first and export what it returns."
        )
    active = [] if module.disable_adapters else [a for a in module.active_adapters if _has(module, a)]
    if saved:
        yield from _of_module(module.modules_to_save[active[0]] if active else module.original_module, name)
        return
    base = module.get_base_layer()
    if module.disable_adapters and module.merged:  # the next forward would take them out of the weights first
        raise ValueError(
            f"{name} has adapters that are merged and switched off at once, so that its weight is not what it computes "
            "with: call model.unmerge_adapter() first."
        )
    if not active or module.merged:
        yield from _of_module(base, name)
    elif type(base.weight).__name__ in _BNB:
        yield from _merged_into_quantised(module, base, active, name)
    else:
        yield from _merged(module, base, active, name)


def _has(module: Any, adapter: str) -> bool:
    if hasattr(module, "modules_to_save"):
        return adapter in module.modules_to_save
    return any(adapter in getattr(module, own) for own in module.adapter_layer_names)


def _merged(module: Any, base: Any, active: list[str], name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """By PEFT's own merge, into a float32 copy that stands in for the weight meanwhile: the sum is rounded once."""
    if getattr(base, "bias", None) is None:
        _require_no_bias(module, active, name)
    before = {own: parameter.data for own, parameter in base.named_parameters()}
    try:
        for own, parameter in base.named_parameters():
            parameter.data = before[own].to(torch.float32, copy=True)
        module.merge(adapter_names=active)
        merged = {own: parameter.data for own, parameter in base.named_parameters()}
    finally:
        for own, parameter in base.named_parameters():
            parameter.data = before[own]
        module.merged_adapters.clear()
    for own, tensor in merged.items():
        yield _join(name, own), _finite(tensor, name).to(before[own].dtype)


def _merged_into_quantised(module: Any, base: Any, active: list[str], name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The dequantised weight plus each adapter's B A times its scale, in float32; PEFT would quantise the sum again."""
    for adapter in active:
        if not _adds_a_matrix(module, adapter):
            raise ValueError(
                f"{name} is quantised, and adapter {adapter!r} does more than add a matrix to its weight, as LoRA does "
                "(but not DoRA), so it is not merged here: load the base model without quantisation and put the "
                "adapter on it, or serve it with PEFT."
            )
    weight, bias = _dequantised(base).float(), base.bias
    if bias is None:
        _require_no_bias(module, active, name)
    for adapter in active:
        weight += module.get_delta_weight(adapter).float().to(weight.device)
        if bias is not None and getattr(module, "lora_bias", {}).get(adapter):
            bias = bias.float() + module.lora_B[adapter].bias.float() * module.scaling[adapter]
    yield _join(name, "weight"), _finite(weight, name)
    if bias is not None:
        yield _join(name, "bias"), bias


def _require_no_bias(module: Any, active: list[str], name: str) -> None:
    """Raise ValueError if an adapter of a layer without a bias has one, which no weight of that layer can hold."""
    for adapter in active:
        if getattr(module, "lora_bias", {}).get(adapter):
            raise ValueError(
                f"{name} has no bias, and adapter {adapter!r} was trained with lora_bias=True: serve it with PEFT."
            )


def _adds_a_matrix(module: Any, adapter: str) -> bool:
    """Whether an adapter's effect on a quantised layer is the sum of the weight and `get_delta_weight`."""
    is_other_lora = adapter in getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(adapter)
    has_matrix = hasattr(module, "get_delta_weight")  # not AdaLoRA's, which are of LoRA's class
    return has_matrix and not is_other_lora and any(kind.__name__ in _ADDING for kind in type(module).__mro__)


def _finite(weight: torch.Tensor, name: str) -> torch.Tensor:
    if not torch.isfinite(weight).all():
        raise ValueError(f"the adapter on {name} makes weights that are not finite: its training has diverged.")
    return weight


def _dequantised(module: Any) -> torch.Tensor:
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    # a forward on a CPU leaves 4-bit weights in another order, of which the call below knows nothing: this puts it back
    module.state_dict()
    return dequantize_bnb_weight(module.weight, getattr(module, "state", None))


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
