"""Refuse a model given by name whose files lack weights: Transformers would draw them at random."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.trainer.utils import create_model_from_path

from rope_patch.checkpoints.checked_loading import require_whole

if TYPE_CHECKING:
    from ..config import RopeSFTConfig


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
def loading_whole_weights(model: Any, args: "RopeSFTConfig") -> Iterator[None]:
    """Make TRL refuse a model given by name whose weights are missing, misshapen or damaged.

    Not checked: ZeRO-3, whose ranks load parts, and `model_init_kwargs` with `ignore_mismatched_sizes` or a class of
    the user's (`architecture`). `args` is restored at the end.
    """
    given = args.model_init_kwargs
    asked: Any = given or {}  # parsed from JSON by now
    if (
        isinstance(model, str)
        and not is_deepspeed_zero3_enabled()
        and not {"architecture", "ignore_mismatched_sizes"} & asked.keys()
    ):
        args.model_init_kwargs = {"architecture": _Whole, **asked}
    try:
        yield
    finally:
        args.model_init_kwargs = given
