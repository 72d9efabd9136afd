"""How FSDP and DeepSpeed hold weights: compute dtype, sharding, and quantized weights that a copy would damage."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from rope_patch.losses import CopiedTeacher


def computed_in(accelerator: Accelerator) -> torch.dtype | None:
    """The dtype that FSDP or DeepSpeed casts weights to for computing, None if it does not.

    Otherwise autocast casts, one operation at a time.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        policy = getattr(accelerator.state.fsdp_plugin, "mixed_precision_policy", None)
        return getattr(policy, "param_dtype", None)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)  # "no" casts nothing
    return None


def hold_like_student(teacher: CopiedTeacher, accelerator: Accelerator) -> None:
    """Hold a teacher's copy as the engine holds the student: in its dtype, and under FSDP2 in parts."""
    dtype = computed_in(accelerator)
    if dtype is not None:
        teacher.cast(dtype)
    if accelerator.is_fsdp2 and not teacher.offload:  # one on the host waits there whole
        teacher.shard()


def require_unharmed_codes(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise ValueError if FSDP would damage 4-bit weights, or separate 8-bit weights from their scales.

    4-bit weights stored as integers, bitsandbytes' default, are safe: accelerate keeps them whole on each GPU.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    dtype = computed_in(accelerator)
    whole = "leave bnb_4bit_quant_storage out, so that they stay whole on each GPU, or use DDP"
    for parameter in model.parameters():
        kind = type(parameter).__name__
        if kind == "Int8Params":
            raise ValueError("FSDP does not train on weights in 8 bits: take load_in_4bit, or DDP.")
        if kind != "Params4bit" or not parameter.is_floating_point():  # bnb_4bit_quant_storage: codes in a float's bits
            continue
        stored = str(parameter.dtype).removeprefix("torch.")
        if not copies_bits(parameter.dtype, accelerator.device):
            raise ValueError(
                f"FSDP copies weights by a kernel of torch {torch.__version__} that takes all NaNs in {stored} for one "
                f"(pytorch issue 159333), which destroys 4-bit weights that lie in {stored}: {whole}."
            )
        if dtype not in (None, parameter.dtype):
            computed = str(dtype).removeprefix("torch.")
            remedy = f"set bnb_4bit_quant_storage to {computed!r}" if copies_bits(dtype, accelerator.device) else whole
            raise ValueError(
                f"FSDP computes in {computed} here, and would cast 4-bit weights that lie in {stored}, which destroys "
                f"them: {remedy}."
            )


def copies_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the copy of a list of tensors by which FSDP2 gathers weights keeps all bits of numbers of a dtype."""
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=device)  # all 16-bit patterns, including NaNs
    copy = torch.zeros_like(codes)
    torch._foreach_copy_([copy.view(dtype)], [codes.view(dtype)])
    return torch.equal(copy, codes)


def forget_unfinished_forwards(model: nn.Module) -> None:
    """Make FSDP2 gather the last norm and the head again after an evaluation by TRL's loss.

    accelerate puts both into one group, and TRL reads the head's weight without calling it. Torch before 2.13 waits for
    that call until the next backward. A save in between reshards the weights, and forwards fail.
    """
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is not None:
            getattr(state, "_modules_to_run_forward", set()).clear()
