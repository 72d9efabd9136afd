"""Estimate the memory of a training step, and decide whether rows are long for a device."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from accelerate.utils.other import is_compiled_module
from torch import nn

from rope_kernels.common.gpu_memory import free_gpu_bytes
from rope_patch.attention.rows import why_masks_stay
from rope_patch.families.attention_calls import attention_kernel
from rope_patch.losses.teacher import adapter_layers
from rope_patch.rope.rotary import find_causal_lm, find_decoder, text_modules

from ..engines.sharding import Sharding
from .offloaded import checkpointed_layers, pinned_bytes
from .size import ModelSize, numel
from .step import MASKS_TO, Memory, Step, peak_memory
from .tiled import TILE

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

LongRows = Literal["auto", "on", "off"]

GIB = 1 << 30
_SHARE_OF_DEVICE = 0.92  # the rest is for fragments and for CUDA itself
_SHARE_OF_HOST = 0.7
# of a container, by either version of Linux's control groups
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class MemoryPlan:
    """What a training step needs, and whether its rows are treated as long.

    Args:
        tokens: of a row, with padding, times rows of a batch.
        memory: without tiles and offloading.
        memory_when_on: in tiles and with offloaded checkpoints.
        capacity: bytes of the device for a step.
        offloaded_layers: layers whose input is offloaded to the host when rows are long.
        offloaded: bytes of those inputs.
        on: whether rows are treated as long.
        mask_free: whether there may be rows of `MASKS_TO` tokens and more, which are read without masks in any case.
        reason: why `on` is as it is.
        sharding: what the engine splits over ranks.
    """

    tokens: int
    memory: Memory
    memory_when_on: Memory
    capacity: int
    offloaded_layers: int
    offloaded: int
    on: bool
    mask_free: bool
    reason: str
    sharding: Sharding

    def __str__(self) -> str:
        table = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.memory.parts.items())
        text = (
            f"long_rows is {'on' if self.on else 'off'}: {self.reason} By estimate a step of {self.tokens} tokens "
            f"needs {self.memory.total / GIB:.1f} GiB ({table})"
        )
        if not self.on:
            return f"{text}."
        return (
            f"{text}; with {f'tiles of {TILE} tokens and ' * self.sharding.runs_in_tiles}the checkpoints of "
            f"{self.offloaded_layers} layers on the host "
            f"({self.offloaded / GIB:.1f} GiB there), {self.memory_when_on.total / GIB:.1f} GiB."
        )


def plan_memory(
    model: nn.Module,
    args: "RopeSFTConfig",
    row_length: int | None,
    device: torch.device,
    mode: LongRows,
    sharding: Sharding | None = None,
    host: int | None = None,
    in_4_bits: bool = False,
) -> MemoryPlan:
    """Estimate the memory of a step and decide whether rows are long, from a model with adapters, on any device.

    Args:
        model: as it is trained.
        args: of the trainer.
        row_length: tokens of the longest row, before ranks share it; None if it is not known.
        device: of the training.
        mode: `long_rows` of `args`.
        sharding: what the engine splits over ranks; None for nothing.
        host: bytes that a rank may pin on its host; None takes `host_memory`.
        in_4_bits: whether the layers of `model` are to be quantised.
    """
    sharding = sharding or Sharding()
    size, step = ModelSize.of(model), replace(_step(model, args, row_length, sharding), in_4_bits=in_4_bits)
    n = math.ceil(step.row_length / sharding.row)
    compiled_calls = (getattr(module, "_compiled_call_impl", None) for module in model.modules())
    # torch.compile would compile again wherever attention is patched
    is_compiled = args.torch_compile or is_compiled_module(model) or any(call is not None for call in compiled_calls)
    needs_no_masks = why_masks_stay(model) is None
    mask_free = mode != "off" and (row_length is None or n >= MASKS_TO) and not is_compiled and needs_no_masks
    off = replace(step, attention="blocks") if mask_free else step
    memory = peak_memory(size, off, sharding)

    layers = checkpointed_layers(model) if args.gradient_checkpointing else []
    checkpoint = memory.checkpoints // (size.n_layers + 1)  # bytes of one layer's input, or of the last norm's
    offloaded_layers = 0
    if device.type != "cpu":
        host = host_memory() if host is None else host
        offloaded_layers = min(len(layers), host // pinned_bytes(checkpoint))
    on = replace(off, long=True, offloaded_layers=offloaded_layers)
    plan = MemoryPlan(
        tokens=step.rows * n,
        memory=memory,
        memory_when_on=peak_memory(size, replace(on, attention="blocks") if needs_no_masks else on, sharding),
        capacity=device_memory(device),
        offloaded_layers=offloaded_layers,
        offloaded=offloaded_layers * checkpoint,
        on=mode == "on",
        mask_free=mask_free,
        reason=f"long_rows={mode!r} asks for it.",
        sharding=sharding,
    )
    return plan if mode != "auto" else _decided(plan, args, row_length, device)


def _decided(plan: MemoryPlan, args: "RopeSFTConfig", row_length: int | None, device: torch.device) -> MemoryPlan:
    """The plan with long_rows="auto": on where a step does not fit the device."""
    on = False
    if device.type == "cpu":
        reason = "training runs on the CPU, whose memory is the host's."
    elif not args.gradient_checkpointing:
        reason = "gradient_checkpointing is off, and long rows need it."
    elif row_length is None:
        reason = "the length of rows is not known before they are read; give max_length, or long_rows='on'."
    else:
        on = plan.memory.total > plan.capacity
        room = f"the device has {plan.capacity / GIB:.1f} GiB for a step"
        reason = f"{room}, which is {'too little' if on else 'enough'}."
    return replace(plan, on=on, reason=reason)


def _step(model: nn.Module, args: "RopeSFTConfig", row_length: int | None, sharding: Sharding) -> Step:
    """The step of a trainer, where Transformers makes the masks of SDPA."""
    adapters = adapter_layers(model)
    causal_lm: Any = find_causal_lm(model)
    mlps = [module for _, module in text_modules(find_decoder(model)) if type(module).__name__.endswith("MLP")]
    trains_mlp = any(parameter.requires_grad for mlp in mlps for parameter in mlp.parameters())  # or adapters on them
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    n_trained = sum(map(numel, trained))
    options = args.objective_options
    rows = args.per_device_train_batch_size
    # TRL joins the rows of a batch that are not padded
    joined = rows if args.padding_free or (args.packing and args.packing_strategy != "wrapped") else 1
    moved = _moved_share(args, row_length)
    factors = options.activation_factors(find_decoder(model).config, moved, shared=sharding.row > 1)
    return Step(
        train="lora" if adapters else "all" if trains_mlp else "qkv",
        lora_rank=max((max(getattr(layer, "r", {}).values(), default=0) for layer in adapters), default=0),
        row_length=joined * (row_length or 0),
        autocast=args.bf16 or args.fp16,
        checkpointing=args.gradient_checkpointing,
        teacher=options.needs_teacher,
        rows=rows // joined,
        accumulates=args.gradient_accumulation_steps > 1,
        weight_bytes=causal_lm.get_input_embeddings().weight.element_size(),
        trained=n_trained,
        trained_bytes=sum(numel(p) * p.element_size() for p in trained) / max(n_trained, 1),
        optimizer=args.optim,
        own_loss=args.has_own_loss or args.loss_type != "nll",  # TRL's loss has few logits at a time
        adapts_mlp=bool(adapters) and trains_mlp,
        trains_head=causal_lm.get_output_embeddings().weight.requires_grad,
        teacher_on_host=args.teacher_offload,
        attention="masks" if attention_kernel(causal_lm) == "sdpa" else "kernel",
        # of several documents, and of shorter rows that are padded
        masks_all=args.packing or args.padding_free or rows > 1,
        factors=factors,
    )


def _moved_share(args: "RopeSFTConfig", row_length: int | None) -> float:
    """The largest share of a row that a draw of the view moves; 1 where rows are of several documents."""
    if row_length is None or args.packing or args.padding_free:
        return 1.0
    try:
        share = args.make_view().affected_share(torch.arange(row_length), torch.full((row_length,), row_length))
    except ValueError:  # the view does not know it
        return 1.0
    return float((share > 0).double().mean())


def device_memory(device: torch.device) -> int:
    """Bytes that training may take on a device: free ones, and those that PyTorch has reserved."""
    if device.type == "cuda":
        # what PyTorch holds counts as room, since the plan includes the weights that are there already
        return int(_SHARE_OF_DEVICE * (free_gpu_bytes(device) + torch.cuda.memory_reserved(device)))
    return int(_SHARE_OF_DEVICE * psutil.virtual_memory().available)


def host_memory() -> int:
    """Bytes that this process may pin on the host, within a container's limit and shared with other ranks."""
    available = psutil.virtual_memory().available
    for limit in _LIMITS:
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            available = min(available, int(text) - psutil.Process().memory_info().rss)  # a limit is on all that it has
    # a rank for each GPU of this host
    ranks = torch.cuda.device_count() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1
    return max(int(_SHARE_OF_HOST * available / max(ranks, 1)), 0)
