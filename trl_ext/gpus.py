"""Which GPU a process trains on where it sees several."""

from typing import TYPE_CHECKING

import torch
from accelerate.utils import DistributedType
from transformers.utils import logging

if TYPE_CHECKING:
    from .config import RopeSFTConfig

logger = logging.get_logger(__name__)


def sees_idle_gpus(args: "RopeSFTConfig") -> bool:
    """Whether GPUs are visible that this training leaves idle: one process trains on one."""
    if args.device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    return args.distributed_state.distributed_type == DistributedType.NO


def load_on_one_gpu(args: "RopeSFTConfig") -> None:
    """Let TRL load a model given by name on the GPU that trains, in place; without a word it spreads it over all.

    A `device_map` in `model_init_kwargs` stays.
    """
    if sees_idle_gpus(args):
        args.model_init_kwargs = {"device_map": {"": args.device.index or 0}, **(args.model_init_kwargs or {})}  # type: ignore[dict-item]


def tell_idle_gpus(args: "RopeSFTConfig") -> None:
    """Say which GPU trains, and what takes all."""
    if sees_idle_gpus(args):
        logger.warning(
            f"{torch.cuda.device_count()} GPUs are visible, and one process trains on one, {args.device}: `rope-patch "
            "train RECIPE.yaml --accelerate_config ddp` takes all, and so does `accelerate launch` for a script."
        )
