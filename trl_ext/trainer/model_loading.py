"""How TRL loads a model given by name: from whole files, and on the one GPU that trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import DistributedType
from transformers import AutoConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging
from trl.trainer.utils import create_model_from_path

from rope_patch.checkpoints.checked_loading import require_whole

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

logger = logging.get_logger(__name__)

# arguments of loading that say where the config is
_OF_CONFIG = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code")


class _Whole:
    """Stands in for the class that TRL loads a model with, and refuses a checkpoint that is not whole."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        # TRL would look for the class in the config of "main", which may be gone
        config = AutoConfig.from_pretrained(name, **{key: options[key] for key in _OF_CONFIG if key in options})
        architecture = getattr(transformers, config.architectures[0], None)
        return require_whole(name, partial(create_model_from_path, name, architecture, **options))


@contextmanager
def loading_options(model: Any, args: "RopeSFTConfig") -> Iterator[None]:
    """Add to `model_init_kwargs` while TRL loads a model given by name; what the user has set wins.

    Weights that are missing, misshapen or damaged are refused, as Transformers would draw them at random. Not checked:
    ZeRO-3, whose ranks load parts, and `model_init_kwargs` with `ignore_mismatched_sizes` or a class of the user's
    (`architecture`). Where a process sees several GPUs, the model lies on the one that trains: TRL would silently
    spread it over all.
    """
    user_options = args.model_init_kwargs
    options: dict[str, Any] = {**(user_options or {})}  # type: ignore[dict-item]  # parsed from JSON by now
    if sees_idle_gpus(args):
        options.setdefault("device_map", {"": args.device.index or 0})  # all of the model on the GPU that trains
    if (
        isinstance(model, str)
        and not is_deepspeed_zero3_enabled()
        and not {"architecture", "ignore_mismatched_sizes"} & options.keys()
    ):
        options["architecture"] = _Whole
    if options:
        args.model_init_kwargs = options
    try:
        yield
    finally:
        args.model_init_kwargs = user_options  # what is saved with checkpoints names no class of ours


def sees_idle_gpus(args: "RopeSFTConfig") -> bool:
    """Whether more GPUs are visible than this one process trains on."""
    if args.device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    return args.distributed_state.distributed_type == DistributedType.NO


def warn_of_idle_gpus(args: "RopeSFTConfig") -> None:
    """Warn which GPU trains, and how to use all."""
    if sees_idle_gpus(args):
        logger.warning(
            f"{torch.cuda.device_count()} GPUs are visible, and one process trains on one, {args.device}: `rope-patch "
            "train RECIPE.yaml --accelerate-config ddp` takes all, and so does `accelerate launch` for a script."
        )
