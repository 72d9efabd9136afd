"""Which GPU a process trains on where it sees several."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from transformers.utils import logging

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

logger = logging.get_logger(__name__)


def sees_idle_gpus(args: "RopeSFTConfig") -> bool:
    """Whether more GPUs are visible than this one process trains on."""
    if args.device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    return args.distributed_state.distributed_type == DistributedType.NO


@contextmanager
def loading_on_one_gpu(args: "RopeSFTConfig") -> Iterator[None]:
    """Make TRL load a model given by name on the GPU that trains; it would silently spread it over all.

    A `device_map` in `model_init_kwargs` wins. `args` is restored at the end.
    """
    given = args.model_init_kwargs
    if sees_idle_gpus(args):
        asked: Any = given or {}  # parsed from JSON by now
        args.model_init_kwargs = {"device_map": {"": args.device.index or 0}, **asked}
    try:
        yield
    finally:
        args.model_init_kwargs = given


def tell_idle_gpus(args: "RopeSFTConfig") -> None:
    """Warn which GPU trains, and how to use all."""
    if sees_idle_gpus(args):
        logger.warning(
            f"{torch.cuda.device_count()} GPUs are visible, and one process trains on one, {args.device}: `rope-patch "
            "train RECIPE.yaml --accelerate-config ddp` takes all, and so does `accelerate launch` for a script."
        )
