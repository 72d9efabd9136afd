"""Estimate which engine fits a fine-tuning on several GPUs, before anything is loaded or launched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch.rope.rotary import find_causal_lm

from ..engines.sharding import Sharding
from ..memory.plan import GIB, device_memory, host_memory, plan_memory
from ..runs.checkpoint import trusts_code
from ..trainer.model_setup import train_qkv_only
from ..trainer.objective_checks import why_not_shared


@dataclass(frozen=True)
class EngineNeed:
    """Bytes at the peak of a step on each GPU.

    Args:
        config: name of the engine's config.
        n_gpus: GPUs in all.
        bytes: without `long_rows`.
        bytes_long: with `long_rows`.
        refused: why the engine does not take the training; None if it does.
    """

    config: str
    n_gpus: int
    bytes: int
    bytes_long: int
    refused: str | None = None

    def fits(self, capacity: int) -> str:
        """Whether it fits a GPU with `capacity` bytes for a step, in words."""
        if self.refused is not None:
            return "refused"
        if self.bytes <= capacity:
            return "fits"
        return "fits with long_rows" if self.bytes_long <= capacity else "does not fit"


def engine_needs(
    model: nn.Module,
    training: Any,
    n_gpus: int,
    device: torch.device,
    gpus_per_row: int | None = None,
    in_4_bits: bool = False,
) -> list[EngineNeed]:
    """The needs of each engine on `n_gpus` GPUs, in order of increasing communication.

    Args:
        model: as it is trained, on any device.
        training: a `RopeSFTConfig` with max_length.
        n_gpus: GPUs in all, of one host.
        device: that trains.
        gpus_per_row: GPUs that share a row; None for all.
        in_4_bits: whether the layers of `model` are to be quantised.
    """
    needs = []
    may_be_long = training.long_rows != "off" and training.gradient_checkpointing
    host = host_memory() // n_gpus  # of each rank
    for config in ("ddp", "zero2", "fsdp2", "fsdp2-cp") if n_gpus > 1 else ("ddp",):
        sharding = Sharding.of_config(config, n_gpus, gpus_per_row)
        mode = training.long_rows
        plan = plan_memory(model, training, training.max_length, device, mode, sharding, host, in_4_bits)
        refused = why_not_shared(model, training, "cp", sharding.row) if sharding.ring else None
        long = plan.memory_when_on.total if may_be_long else plan.memory.total
        needs.append(EngineNeed(config, n_gpus, plan.memory.total, long, refused))
    return needs


def engine_advice(
    model_config: Any,
    training: Any,
    peft_config: Any,
    dtype: Any,
    n_gpus: Sequence[int],
    *,
    attention: str | None = None,
    gpus_per_row: int | None = None,
    in_4_bits: bool = False,
    available: int | None = None,
) -> str:
    """A table of the memory that each engine needs, and a recommendation.

    Args:
        model_config: config of the model, or its name.
        training: a `RopeSFTConfig` with max_length.
        peft_config: of adapters, or None.
        dtype: of the weights; None is float32, as TRL loads them.
        n_gpus: numbers of GPUs to look at, rising.
        attention: implementation that the model is loaded with; None for Transformers' choice.
        gpus_per_row: GPUs that share a row under "fsdp2-cp"; None for all.
        in_4_bits: whether the layers of the model are to be quantised.
        available: the most GPUs that may be advised; None for all that are looked at.

    Raises:
        ValueError: the length of rows is not known.
    """
    if training.max_length is None:
        raise ValueError("a plan needs the length of rows: give max_length.")
    model = model_on_meta(model_config, peft_config, dtype, trusts_code(training))
    if attention is not None:  # only the name is needed, and its kernels may not be installed here
        find_causal_lm(model).config._attn_implementation = attention
    if training.trainable == "qkv":
        train_qkv_only(model)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    needs = [need for n in n_gpus for need in engine_needs(model, training, n, device, gpus_per_row, in_4_bits)]
    tokens = training.per_device_train_batch_size * training.max_length
    most = max(n_gpus) if available is None else available
    reasons = [why_not_shared(model, training, "sp", gpus_per_row or n) for n in n_gpus if n > 1]
    ulysses = reasons[0] if reasons and all(reasons) else None
    return _table(needs, tokens, device_memory(device) if has_gpu else None, most, ulysses)


def choose_engine(needs: Sequence[EngineNeed], capacity: int) -> EngineNeed | None:
    """The engine that fits on the fewest GPUs; whole rows win over shared ones, and no `long_rows` over it."""
    fitting = [need for need in needs if need.fits(capacity) in ("fits", "fits with long_rows")]
    order = [(need.n_gpus, need.config.endswith("-cp"), need.fits(capacity) != "fits") for need in fitting]
    return fitting[order.index(min(order))] if fitting else None


def _table(needs: Sequence[EngineNeed], tokens: int, capacity: int | None, most: int, ulysses: str | None) -> str:
    """The needs, and which of at most `most` GPUs with `capacity` bytes for a step to take; None without a GPU.

    `ulysses` is why "zero3-sp" is refused, None if it is not.
    """
    lines = [f"A step of {tokens} tokens, estimated peak in GiB on each GPU:"]
    for need in needs:
        text = f"  {need.n_gpus} GPU{'s' * (need.n_gpus > 1):1} {need.config:9} {need.bytes / GIB:8.1f}"
        if need.refused is not None:
            text += f"  refused: {need.refused}"
        elif capacity is not None:
            text += f"  {need.bytes_long / GIB:8.1f} with long_rows: {need.fits(capacity)}"
        lines.append(text)
    lines.append("zero3 and zero3-sp need about what fsdp2 and fsdp2-cp do, and a few GiB for DeepSpeed's buffers.")
    if ulysses is not None:
        lines.append(f"zero3-sp is refused: {ulysses}.")
    if capacity is None:
        lines.append("torch sees no GPU here: take the first line that is a tenth below the memory of your GPUs.")
        return "\n".join(lines)
    best = choose_engine([need for need in needs if need.n_gpus <= most], capacity)
    if best is None:
        lines.append(
            f"None fits here, on {most} GPUs with {capacity / GIB:.1f} GiB for a step: train adapters, or use shorter "
            "rows or more GPUs."
        )
    elif best.n_gpus == 1:
        how = "" if best.fits(capacity) == "fits" else ", with long_rows, which is switched on automatically"
        lines.append(f"One GPU with {capacity / GIB:.1f} GiB for a step is enough{how}: rope-patch train RECIPE.yaml.")
    else:
        flags = f"--accelerate-config {best.config} --num-processes {best.n_gpus}"
        lines.append(f"With {capacity / GIB:.1f} GiB for a step on each GPU: {flags}.")
    return "\n".join(lines)


def model_on_meta(model_config: Any, peft_config: Any, dtype: Any, trust_remote_code: bool = False) -> nn.Module:
    """The model on the device "meta", without memory for its weights."""
    config = model_config
    if isinstance(model_config, str):
        config = AutoConfig.from_pretrained(model_config, trust_remote_code=trust_remote_code)
    kind = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if kind in (None, "auto"):  # None is TRL's float32, "auto" the checkpoint's dtype
        kind = torch.float32 if kind is None else config.dtype
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=trust_remote_code)
        if peft_config is None:
            return model
        from peft import get_peft_model  # an extra, which not every training needs

        return get_peft_model(model, peft_config)
