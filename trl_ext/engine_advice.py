"""Which engine fits a fine-tuning on several GPUs, by arithmetic, before anything is loaded or launched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch.rotary import find_decoder

from .memory_plan import GIB, MemoryPlan, plan_memory
from .model_setup import train_qkv_only


@dataclass(frozen=True)
class TrainingBytes:
    """What a training holds apart from what grows with rows, in bytes.

    Args:
        weights: the model's, adapters included.
        gradients: of what is trained.
        optimizer: its states.
        gathered: weights that an engine that shards them has whole at a time: two layers, embeddings and head.
        teacher: a frozen copy of the weights, whole on each GPU; 0 without one.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    teacher: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: int, *, copies_teacher: bool) -> "TrainingBytes":
        """Those of a model as it is trained, on any device."""
        parameters = list(model.parameters())
        layers: Any = find_decoder(model).layers
        in_layers = _bytes(layers.parameters())
        return cls(
            weights=_bytes(parameters),
            gradients=_bytes(p for p in parameters if p.requires_grad),
            optimizer=optimizer,
            gathered=_bytes(parameters) - in_layers + 2 * in_layers // len(layers),
            teacher=_bytes(parameters) if copies_teacher else 0,
        )

    def on_each(self, config: str, n_gpus: int) -> int:
        """Bytes on each of `n_gpus` under one of `launching.config_names`.

        With W, G, O, T of weights, gradients, optimizer and teacher and R GPUs: ddp has W + G + O + T, zero2
        W + (G + O) / R + T, and those that shard weights (W + G + O) / R + gathered + T.
        """
        if config == "ddp":
            return self.weights + self.gradients + self.optimizer + self.teacher
        if config == "zero2":
            return self.weights + (self.gradients + self.optimizer) // n_gpus + self.teacher
        return (self.weights + self.gradients + self.optimizer) // n_gpus + self.gathered + self.teacher


@dataclass(frozen=True)
class EngineNeed:
    """Bytes at the peak of a step on each GPU.

    Args:
        config: name of the engine's config.
        n_gpus: GPUs in all.
        bytes: without anything done about rows.
        bytes_long: with `long_rows`.
    """

    config: str
    n_gpus: int
    bytes: int
    bytes_long: int

    def fits(self, capacity: int) -> str:
        """What a GPU with `capacity` bytes for a step says to it."""
        if self.bytes <= capacity:
            return "fits"
        return "fits with long_rows" if self.bytes_long <= capacity else "does not fit"


def engine_needs(fixed: TrainingBytes, whole: MemoryPlan, part: MemoryPlan, n_gpus: int) -> list[EngineNeed]:
    """Needs of each engine, the one with the least communication first.

    Args:
        fixed: what does not grow with rows.
        whole: plan of a step of whole rows.
        part: plan of a step of rows that all GPUs share.
        n_gpus: GPUs in all.
    """
    needs = []
    for config in ("ddp", "zero2", "fsdp2", "fsdp2-cp"):
        plan = part if config == "fsdp2-cp" else whole
        on_each = fixed.on_each(config, n_gpus)
        of_rows, of_long_rows = plan.needed - plan.fixed, plan.needed_when_on - plan.fixed
        needs.append(EngineNeed(config, n_gpus, on_each + of_rows, on_each + of_long_rows))
    return needs


def engine_advice(model_config: Any, training: Any, peft_config: Any, dtype: Any, n_gpus: Sequence[int]) -> str:
    """A table of what each engine needs on so many GPUs, and which one to take.

    Args:
        model_config: config of the model, or its name.
        training: a `RopeSFTConfig` with max_length.
        peft_config: of adapters, or None.
        dtype: of the weights; None is float32, as TRL loads them.
        n_gpus: numbers of GPUs to look at, rising.

    Raises:
        ValueError: the length of rows is not known.
    """
    if training.max_length is None:
        raise ValueError("a plan needs the length of rows: give max_length.")
    model = model_on_meta(model_config, peft_config, dtype)
    if training.trainable == "qkv":
        train_qkv_only(model)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    whole = plan_memory(model, training, training.max_length, device, "on")
    copies = training.objective_options.needs_teacher and peft_config is None
    fixed = TrainingBytes.of(model, whole.optimizer, copies_teacher=copies)
    needs: list[EngineNeed] = []
    for n in n_gpus:
        part = plan_memory(model, training, -(-training.max_length // n), device, "on")
        needs += [need for need in engine_needs(fixed, whole, part, n) if n > 1 or need.config == "ddp"]
    return _table(needs, whole.tokens, whole.capacity if has_gpu else None)


def choose_engine(needs: Sequence[EngineNeed], capacity: int) -> EngineNeed | None:
    """The first that fits as it is, else of the most GPUs the first that fits with `long_rows`; None if none does."""
    as_it_is = [need for need in needs if need.fits(capacity) == "fits"]
    most = max(need.n_gpus for need in needs)
    long = [need for need in needs if need.n_gpus == most and need.fits(capacity) != "does not fit"]
    return next(iter(as_it_is or long), None)


def _table(needs: Sequence[EngineNeed], tokens: int, capacity: int | None) -> str:
    """The needs, and what they come to on GPUs with `capacity` bytes for a step; None where there is no GPU to ask."""
    lines = [f"A step of {tokens} tokens, GiB on each GPU at its peak, by arithmetic:"]
    for need in needs:
        text = f"  {need.n_gpus} GPU{'s' * (need.n_gpus > 1):1} {need.config:9} {need.bytes / GIB:8.1f}"
        if capacity is not None:
            text += f"  {need.bytes_long / GIB:8.1f} with long_rows: {need.fits(capacity)}"
        lines.append(text)
    lines.append("zero3 and zero3-sp need what fsdp2 and fsdp2-cp do.")
    if capacity is None:
        lines.append("torch sees no GPU here: take the first line that is a tenth below the memory of yours.")
        return "\n".join(lines)
    best = choose_engine(needs, capacity)
    if best is None:
        lines.append(f"None fits {capacity / GIB:.1f} GiB: train adapters, take shorter rows, or more GPUs.")
    elif best.n_gpus == 1:
        lines.append(f"One GPU with {capacity / GIB:.1f} GiB for a step is enough: rope-patch train RECIPE.yaml.")
    else:
        flags = f"--accelerate_config {best.config} --num_processes {best.n_gpus}"
        lines.append(f"With {capacity / GIB:.1f} GiB for a step on each GPU: {flags}.")
    return "\n".join(lines)


def model_on_meta(model_config: Any, peft_config: Any, dtype: Any) -> nn.Module:
    """The model without memory for its weights."""
    config = AutoConfig.from_pretrained(model_config) if isinstance(model_config, str) else model_config
    kind = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if kind in (None, "auto"):
        kind = torch.float32 if kind is None else config.dtype
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=kind)
        if peft_config is None:
            return model
        from peft import get_peft_model  # an extra, which not every training needs

        return get_peft_model(model, peft_config)


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
