"""A model before it is trained: what earlier training left on it, which weights train, whether it has RoPE at all."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from rope_patch.rescalings import Rescaling
from rope_patch.rotary import find_causal_lm, find_decoder
from rope_patch.state import state_of


def has_rope(model: nn.Module) -> bool:
    """Whether `patch_model` takes the model."""
    try:
        find_decoder(model)
    except ValueError:
        return False
    return True


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` has patched the model already."""
    return has_rope(model) and state_of(find_decoder(model)) is not None


def require_new_rescaling(rescaling: Rescaling, model: nn.Module) -> None:
    """Raise if an adapter that was loaded brought this rescaling: PI 4x on top of PI 4x would be 16x."""
    state = state_of(find_decoder(model))
    if state is not None and rescaling in state.start_rescalings:
        raise ValueError(
            f"rescale: the adapter of this model was trained with {rescaling}, which load_adapter has put in force, "
            "and a second one would go on top of it. Leave rescale out to go on with the adapter's, or call "
            "patch_model before the trainer for both."
        )


def forget_earlier_trainer(model: nn.Module) -> None:
    """Take off what accelerate put on a model that another trainer has trained.

    accelerate wraps no model twice, and TRL puts its own forward over the wrapper: a second stage would run without
    autocast, in float32, and say nothing.
    """
    forward = model.__dict__.pop("_original_forward", None)
    if forward is not None:
        model.forward = forward
    model.__dict__.pop("_is_accelerate_prepared", None)


def keep_quantised_weights(model: nn.Module) -> None:
    """On CPUs with AVX512-BF16, the first forward in evaluation repacks 4-bit weights of bitsandbytes for good.

    What is trained afterwards gets no gradient, without an error. The flag that this sets is bitsandbytes' own.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def forget_unfinished_forwards(model: nn.Module) -> None:
    """Let FSDP2 gather the last norm and the head again after an evaluation by TRL's loss.

    accelerate puts both into one group, and TRL reads the head's weight without calling it. Torch before 2.13 waits for
    that call until a backward comes, and once something is saved, which splits the weights, forwards fail.
    """
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is not None:
            getattr(state, "_modules_to_run_forward", set()).clear()


def computed_in(accelerator: Accelerator) -> torch.dtype | None:
    """The dtype that FSDP or DeepSpeed casts weights to before it computes with them; None: it takes them as they are.

    Elsewhere autocast does so, one operation at a time.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        policy = getattr(accelerator.state.fsdp_plugin, "mixed_precision_policy", None)
        return getattr(policy, "param_dtype", None)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    return None


def require_unharmed_codes(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise ValueError if FSDP would change codes of 4 bits, or take what decodes those of 8 bits off their weights.

    Codes of 4 bits that lie in integers, bitsandbytes' default, stay whole on each GPU: accelerate leaves them out.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    dtype = computed_in(accelerator)
    whole = "leave bnb_4bit_quant_storage out, by which they stay whole on each GPU, or use DDP"
    for parameter in model.parameters():
        kind = type(parameter).__name__
        if kind == "Int8Params":
            raise ValueError("FSDP does not train on weights in 8 bits: take load_in_4bit, or DDP.")
        if kind != "Params4bit" or not parameter.is_floating_point():
            continue
        held = str(parameter.dtype).removeprefix("torch.")
        if not copies_bits(parameter.dtype, accelerator.device):
            raise ValueError(
                f"FSDP copies weights by a kernel of torch {torch.__version__} that takes all NaNs in {held} for one "
                f"(pytorch issue 159333), which destroys 4-bit weights that lie in {held}: {whole}."
            )
        if dtype not in (None, parameter.dtype):
            wanted = str(dtype).removeprefix("torch.")
            remedy = f"set bnb_4bit_quant_storage to {wanted!r}" if copies_bits(dtype, accelerator.device) else whole
            raise ValueError(
                f"FSDP computes in {wanted} here, and would cast 4-bit weights that lie in {held}, which destroys "
                f"them: {remedy}."
            )


def copies_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the copy of a list of tensors by which FSDP2 gathers weights keeps all bits of numbers of a dtype."""
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=device)  # all of 16 bits, NaNs among them
    copy = torch.zeros_like(codes)
    torch._foreach_copy_([copy.view(dtype)], [codes.view(dtype)])
    return torch.equal(copy, codes)


_QKV = re.compile(r"(^|\.)(q_proj|k_proj|v_proj|qkv_proj|query_key_value|Wqkv|c_attn)\.")


def train_qkv_only(model: nn.Module) -> None:
    """Freeze every weight but those of the projections to queries, keys and values.

    Raises:
        ValueError: the model has adapters, or no projection with a known name.
    """
    decoder = find_decoder(model)
    if find_causal_lm(model) is not model:
        raise ValueError(
            "trainable='qkv' is for training without adapters: name target_modules in peft_config instead."
        )
    names = [name for name, _ in decoder.named_parameters() if _QKV.search(name)]
    if not names:
        raise ValueError(
            f"trainable='qkv' knows no projections to queries, keys and values in {type(model).__name__}: set "
            "trainable='all', or train adapters."
        )
    chosen = {id(parameter) for name, parameter in decoder.named_parameters() if name in names}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
