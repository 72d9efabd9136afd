"""Rows as long as memory allows: tiles, offloaded checkpoints and mask-free attention, by a plan of the step's memory.

Attention avoids masks of n x n even where they would fit, as they also cost time.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from rope_patch.attention.rows import MaskFreeRows, why_masks_stay
from rope_patch.families.attention_calls import attention_kernel
from rope_patch.layout.document_lengths import longest_document
from rope_patch.losses import CopiedTeacher
from rope_patch.rope.rotary import find_causal_lm

from ..engines.sequence_ranks import SequenceRanks
from ..engines.sharding import Sharding
from .offloaded import offloaded_checkpoints
from .plan import GIB, MemoryPlan, plan_memory
from .step import MASKS_TO
from .tiled import TILE, tiled

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

logger = logging.get_logger(__name__)

_PAGED = "paged_adamw_32bit"


class LongRowTraining:
    """Inside `active()`, steps run without masks of n x n; if the plan is on, also in tiles and with offloading.

    Args:
        model: as it is trained, bare or wrapped.
        plan: whether rows are long, and how many layers are offloaded.
        *others: models that run too, such as a copy that teaches.
        shared: whether several ranks share a sequence; their engine then attends without masks.
    """

    def __init__(self, model: nn.Module, plan: MemoryPlan, *others: nn.Module, shared: bool = False) -> None:
        self.models, self.plan = (model, *others), plan
        reason = None if shared else why_masks_stay(model)
        least = 0 if plan.on else MASKS_TO  # tokens of a row from which on there is no mask
        self.rows = None if shared or reason is not None else MaskFreeRows(model, *others, least=least)
        if reason is not None and attention_kernel(find_causal_lm(model)) == "sdpa":
            logger.warning(f"long_rows: attention keeps the masks that Transformers makes, since {reason}")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Open around forward and backward, outside of an objective that records attention."""
        with ExitStack() as stack:
            if self.plan.on:
                for model in self.models:
                    stack.enter_context(tiled(model, TILE))
                stack.enter_context(offloaded_checkpoints(self.models[0], self.plan.offloaded_layers))
            if self.rows is not None:
                stack.enter_context(self.rows.active())
            yield


def plan_long_rows(
    model: nn.Module,
    args: "RopeSFTConfig",
    train_dataset: Any,
    accelerator: Accelerator,
    *,
    ranks: SequenceRanks | None = None,
    teacher_copy: CopiedTeacher | None = None,
    has_optimizer: bool = False,
) -> tuple[MemoryPlan, LongRowTraining | None]:
    """Decide whether rows are long for the device, and log it.

    Args:
        model: patched.
        args: of the trainer; its optimizer becomes a paged one where only that fits.
        train_dataset: as TRL has prepared it.
        accelerator: of the trainer.
        ranks: those that share each sequence, None if none do.
        teacher_copy: a copy of the model that teaches.
        has_optimizer: whether the user gave an optimizer, which then stays.

    Returns:
        The plan, and the context that steps run in, None if they need none.
    """
    longest = None if args.packing else longest_document(train_dataset)
    # TRL may not have truncated to max_length; None if only reading all rows would tell
    row_length = args.max_length if longest is None else longest
    plan = plan_memory(model, args, row_length, args.device, args.long_rows, Sharding.of(accelerator))
    if args.process_index == 0:
        (logger.warning if plan.on else logger.info)(str(plan))
    if not plan.on and (not plan.mask_free or ranks is not None):  # ranks that share rows attend without masks anyway
        return plan, None
    if plan.on and not has_optimizer:
        offload_optimizer(args, plan, args.device)
    # a teacher's copy reads the same long rows
    copies = [] if teacher_copy is None else [teacher_copy.copy]
    return plan, LongRowTraining(model, plan, *copies, shared=ranks is not None)


def offload_optimizer(args: "RopeSFTConfig", plan: MemoryPlan, device: torch.device) -> bool:
    """Switch to paged AdamW if the optimizer's states do not fit the device; returns whether it did.

    CUDA moves the float32 states of bitsandbytes' paged AdamW to the host when memory runs out. An optimizer other than
    Trainer's default is the user's choice and stays. So does one whose states an engine splits over ranks, which
    bitsandbytes cannot read.
    """
    is_default = args.optim in ("adamw_torch", "adamw_torch_fused")
    if not plan.on or not is_default or plan.memory_when_on.total <= plan.capacity or device.type != "cuda":
        return False
    if plan.sharding.optimizer > 1:
        logger.warning(
            f"long_rows: the step needs {plan.memory_when_on.total / GIB:.1f} GiB on each GPU, and there are "
            f"{plan.capacity / GIB:.1f}. Take more GPUs, or a file of accelerate's with fsdp_offload_params: true "
            "(FSDP2) or offload_optimizer_device: cpu (ZeRO)."
        )
        return False
    states = f"{plan.memory.optimizer / GIB:.1f} GiB"
    if find_spec("bitsandbytes") is None:
        logger.warning(
            f"long_rows: states of the optimizer take {states} that do not fit: pip install bitsandbytes, whose "
            f"{_PAGED} can move them to the host."
        )
        return False
    args.optim = _PAGED
    logger.warning(f"long_rows: the optimizer is {_PAGED}, whose states of {states} can move to the host.")
    return True
