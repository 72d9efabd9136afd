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
from .step import MASKS_TO, ModelSize, Step, bytes_of_loss, in_flight_of_layer, saved_of_layer
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
    """Bytes that a training step needs, and whether its rows are treated as long.

    Args:
        tokens: of a row, with padding, times rows of a batch.
        fixed: weights, gradients and, on the device, states of the optimizer; a frozen copy that teaches; 16-bit
            copies of float32 weights that autocast keeps. Of what an engine splits over ranks, the part of one rank.
        optimizer: the part of `fixed` that is states.
        checkpoints: activations that layers save, checkpointed or not.
        freed: the part of `checkpoints` that is freed as gradients are made.
        layer: one layer while its backward runs.
        layer_in_tiles: a layer in tiles without masks, and its input, which comes back from the host.
        loss: logits that exist at a time, and hidden states that are compared; freed before layers run backward.
        beside: tensors that the objective keeps while layers run.
        capacity: memory of the device for a step.
        host: memory of the host for offloaded checkpoints.
        offloaded_layers: layers whose input is offloaded to the host when rows are long.
        offloaded: bytes of those inputs.
        on: whether rows are treated as long.
        mask_free: whether there may be rows of `MASKS_TO` tokens and more, which are read without masks in any case.
        reason: why `on` is as it is.
        sharding: what the engine splits over ranks.
    """

    tokens: int
    fixed: int
    optimizer: int
    checkpoints: int
    freed: int
    layer: int
    layer_in_tiles: int
    loss: int
    beside: int
    capacity: int
    host: int
    offloaded_layers: int
    offloaded: int
    on: bool
    mask_free: bool
    reason: str
    sharding: Sharding

    @property
    def needed(self) -> int:
        """Bytes on the device, without tiles and offloading."""
        return self.fixed + self.checkpoints - self.freed + self.beside + max(self.layer, self.loss)

    @property
    def at_once_when_on(self) -> int:
        """Bytes besides `fixed` and `checkpoints`, in tiles and with offloaded checkpoints."""
        return self.beside + max(self.layer_in_tiles, self.loss)

    @property
    def needed_when_on(self) -> int:
        """Bytes on the device in tiles and with offloaded checkpoints."""
        return self.fixed + self.checkpoints - self.offloaded + self.at_once_when_on

    def __str__(self) -> str:
        parts = {
            "weights, gradients and optimizer": self.fixed,
            "checkpoints": self.checkpoints,
            "one layer, or the loss": max(self.layer, self.loss),
        }
        if self.beside:
            parts["kept by the objective"] = self.beside
        table = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        text = (
            f"long_rows is {'on' if self.on else 'off'}: {self.reason} By estimate a step of {self.tokens} tokens "
            f"needs {self.needed / GIB:.1f} GiB ({table})"
        )
        if not self.on:
            return f"{text}."
        return (
            f"{text}; with {f'tiles of {TILE} tokens and ' * self.sharding.runs_in_tiles}the checkpoints of "
            f"{self.offloaded_layers} layers on the host "
            f"({self.offloaded / GIB:.1f} GiB there), {self.needed_when_on / GIB:.1f} GiB."
        )


def plan_memory(
    model: nn.Module,
    args: "RopeSFTConfig",
    row_length: int | None,
    device: torch.device,
    mode: LongRows,
    sharding: Sharding | None = None,
    host: int | None = None,
) -> MemoryPlan:
    """Estimate the memory of a step and decide whether rows are long, from a model with adapters, on any device.

    Weights count in their own dtype, and whole where ZeRO-3 has split them. States of the optimizer follow from its
    name. `docs/long_rows.md` has the formulas.

    Args:
        model: as it is trained.
        args: of the trainer.
        row_length: tokens of the longest row, before ranks share it; None if it is not known.
        device: of the training.
        mode: `long_rows` of `args`.
        sharding: what the engine splits over ranks; None for nothing.
        host: bytes that a rank may pin on its host; None takes `host_memory`.
    """
    sharding = sharding or Sharding()
    moved = _moved_share(args, row_length)
    factors = args.objective_options.activation_factors(find_decoder(model).config, moved, shared=sharding.row > 1)
    if row_length is not None:
        row_length = math.ceil(row_length / sharding.row)
    size, step = ModelSize.of(find_causal_lm(model)), _step(model, args, row_length)
    tokens = args.per_device_train_batch_size * (row_length or 0)
    layers = checkpointed_layers(model) if args.gradient_checkpointing else []
    fixed, gradients, optimizer = _fixed_bytes(model, args, sharding)
    compiled_calls = (getattr(module, "_compiled_call_impl", None) for module in model.modules())
    # torch.compile would compile again wherever attention is patched
    is_compiled = args.torch_compile or is_compiled_module(model) or any(call is not None for call in compiled_calls)
    may_be_long = row_length is None or row_length >= MASKS_TO
    mask_free = mode != "off" and may_be_long and not is_compiled and why_masks_stay(model) is None
    # engines that split weights compute with them in 16 bits
    of_layer = replace(step, weight_bytes=2) if step.autocast and sharding.weights > 1 else step
    layer, in_tiles = _layer_bytes(model, args, size, of_layer, factors.at_once * tokens, sharding, mask_free=mask_free)
    state = step.weight_bytes * size.hidden
    checkpoint = int(factors.graphs * tokens * state)
    kept = checkpoint if args.gradient_checkpointing else int(factors.graphs * tokens * saved_of_layer(size, step))
    checkpoints = size.n_layers * kept + checkpoint  # the last norm's input too
    keeps_both = args.gradient_accumulation_steps > 1 or sharding.buffers  # DeepSpeed's are of gradients
    host = host_memory() if host is None else host
    offloaded_layers = 0
    if device.type != "cpu":
        offloaded_layers = min(len(layers), host // pinned_bytes(checkpoint))
    head = _head(model)
    plan = MemoryPlan(
        tokens=tokens,
        fixed=fixed,
        optimizer=optimizer,
        checkpoints=checkpoints,
        freed=0 if keeps_both else min(checkpoints, gradients),
        layer=layer,
        layer_in_tiles=in_tiles + (checkpoint if offloaded_layers else 0),
        loss=bytes_of_loss(size, step, tokens, _numel(head) * head.requires_grad, factors.states),
        beside=int(factors.beside * tokens * state),
        capacity=device_memory(device),
        host=host,
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
        on = plan.needed > plan.capacity
        room = f"the device has {plan.capacity / GIB:.1f} GiB for a step"
        reason = f"{room}, which is {'too little' if on else 'enough'}."
    return replace(plan, on=on, reason=reason)


def _step(model: nn.Module, args: "RopeSFTConfig", row_length: int | None) -> Step:
    """The step of a trainer, for estimates of its memory."""
    adapted = adapter_layers(model)
    causal_lm: Any = find_causal_lm(model)
    mlps = [module for _, module in text_modules(find_decoder(model)) if type(module).__name__.endswith("MLP")]
    trains_mlp = any(parameter.requires_grad for mlp in mlps for parameter in mlp.parameters())  # or adapters on them
    return Step(
        train="lora" if adapted else "all" if trains_mlp else "qkv",
        lora_rank=max((max(getattr(layer, "r", {}).values(), default=0) for layer in adapted), default=0),
        row_length=row_length or 0,
        autocast=args.bf16 or args.fp16,
        checkpointing=args.gradient_checkpointing,
        teacher=args.objective_options.needs_teacher,
        weight_bytes=causal_lm.get_input_embeddings().weight.element_size(),
        own_loss=args.has_own_loss or args.loss_type != "nll",  # TRL's loss has few logits at a time
        adapts_mlp=bool(adapted) and trains_mlp,
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


def _fixed_bytes(model: nn.Module, args: "RopeSFTConfig", sharding: Sharding) -> tuple[int, int, int]:
    """Bytes on a rank of what does not grow with rows, and the parts that are gradients and states of the optimizer."""
    bits_16 = args.bf16 or args.fp16
    upcasts = bits_16 and sharding.optimizer > 1  # engines that split states train float32 numbers

    def width(parameter: torch.Tensor) -> int:
        return max(parameter.element_size(), 4 if upcasts and parameter.requires_grad else 1)

    codes = [p for p in model.parameters() if not p.is_floating_point()]  # of 4 bits in integers: no engine splits them
    weights = sum(_numel(p) * width(p) for p in model.parameters() if p.is_floating_point())
    weights += sum(map(_bytes, model.buffers()))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = sum(_state_bytes(args.optim, _numel(p), width(p)) for p in trained)
    optimizer = sharding.keeps_states * optimizer // sharding.optimizer
    gradients = sharding.keeps_states * sum(_numel(p) * width(p) for p in trained) // sharding.gradients
    fixed = sharding.buffers + sharding.keeps_weights * weights // sharding.weights + gradients + optimizer
    fixed += sum(map(_bytes, codes))
    if sharding.weights > 1:
        fixed += _whole_at_a_time(model, bits_16, sharding)
    elif bits_16:  # copies in 16 bits, of what is multiplied
        layers: Any = find_decoder(model).layers
        fixed += sum(2 * _numel(p) for p in (*layers.parameters(), _head(model)) if p.dtype == torch.float32)
    if args.objective_options.needs_teacher and not adapter_layers(model) and not args.teacher_offload:
        fixed += weights // sharding.teacher
        if sharding.teacher > 1:
            fixed += _whole_at_a_time(model, bits_16, sharding)
    return fixed, gradients, optimizer


def _whole_at_a_time(model: nn.Module, bits_16: bool, sharding: Sharding) -> int:
    """Bytes of the weights that an engine has gathered at a time, in the dtype that it computes in."""
    layers: Any = find_decoder(model).layers
    split = [p for p in model.parameters() if p.is_floating_point()]
    sizes = {p: _numel(p) * min(p.element_size(), 2 if bits_16 else 4) for p in split}
    in_layers = sum(sizes.get(p, 0) for p in layers.parameters())
    whole = sum(sizes.values())
    if sharding.live is None:
        return whole - in_layers + 2 * in_layers // len(layers)
    return min(whole, whole * sharding.live // sum(map(_numel, sizes)))


def _head(model: nn.Module) -> torch.Tensor:
    """The weights from hidden states to logits, [vocabulary, hidden]."""
    layer: Any = find_causal_lm(model).get_output_embeddings()
    weight: torch.Tensor = layer.weight
    return weight


def _numel(tensor: torch.Tensor) -> int:
    """Numbers of a tensor; ZeRO-3 leaves none in a parameter that it has split."""
    numel: int = getattr(tensor, "ds_numel", tensor.numel())
    return numel


def _bytes(tensor: torch.Tensor) -> int:
    return _numel(tensor) * tensor.element_size()


def _state_bytes(optim: str, numel: int, width: int) -> int:
    """Bytes of the two states on the device for `numel` weights of `width` bytes, by the optimizer's name."""
    if optim.startswith("paged") or optim in ("sgd", "adafactor"):
        return 0
    if "8bit" in optim:
        return 2 * numel
    return 2 * numel * (4 if "bnb" in optim else width)


def _layer_bytes(
    model: nn.Module,
    args: "RopeSFTConfig",
    size: ModelSize,
    step: Step,
    tokens: float,
    sharding: Sharding,
    *,
    mask_free: bool,
) -> tuple[int, int]:
    """Bytes of one layer in backward whole, and without masks, in tiles if layers run so.

    In tiles attention is the larger part, c (4 H + 6 Q + 2 K) + 4 Q a token: the residual stream and its gradient, the
    norm's output, queries, keys, values, the output, and gradients of all, those of keys and values once for each query
    head, and the float32 sums of queries' gradients in kernels. A ring adds 8 Q + 16 K, float32 sums of its parts'
    outputs and gradients.
    """
    n = step.row_length
    c, queries, keys = step.product_bytes, size.queries, size.keys
    attention = c * (4 * size.hidden + 6 * queries + 2 * keys) + 4 * queries
    attention += sharding.ring * (8 * queries + 16 * keys)
    windowed = 0 < size.sliding_window < n
    in_flight = in_flight_of_layer(size, step, blocks=windowed and mask_free)
    makes_masks = (
        attention_kernel(find_causal_lm(model)) == "sdpa"
        and not mask_free
        # of windows, of several documents, and of shorter rows that are padded
        and (windowed or args.packing or args.padding_free or args.per_device_train_batch_size > 1)
    )
    # bool, and as numbers that are added to scores
    masks = (1 + c) * args.per_device_train_batch_size * n**2 if makes_masks else 0
    masks_in_tiles = masks if why_masks_stay(model) is not None else 0
    tile = (min(tokens, TILE) if sharding.runs_in_tiles else tokens) * in_flight
    return int(tokens * max(attention, in_flight) + masks), int(max(tokens * attention, tile) + masks_in_tiles)


def device_memory(device: torch.device) -> int:
    """Bytes that training may take on a device: free ones, and those that PyTorch has reserved."""
    if device.type == "cuda":
        return int(_SHARE_OF_DEVICE * (free_gpu_bytes(device) + torch.cuda.memory_reserved(device)))
    return int(_SHARE_OF_DEVICE * psutil.virtual_memory().available)


def host_memory() -> int:
    """Bytes that this process may pin on the host, within a container's limit and shared with other ranks."""
    available = psutil.virtual_memory().available
    for limit in _LIMITS:
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            available = min(available, int(text) - psutil.Process().memory_info().rss)
    ranks = torch.cuda.device_count() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1
    return max(int(_SHARE_OF_HOST * available / max(ranks, 1)), 0)
