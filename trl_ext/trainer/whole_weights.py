"""A model that TRL loads by name has all of its weights from its files: Transformers draws others at random."""

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
    """In place of the class that TRL loads a model with: the same one, which also says what it did not find."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        # TRL would look for the class in the config of "main", which may be gone
        config = AutoConfig.from_pretrained(name, **{key: options[key] for key in _OF_CONFIG if key in options})
        architecture = getattr(transformers, config.architectures[0], None)
        return require_whole(name, partial(create_model_from_path, name, architecture, **options))


@contextmanager
def loading_whole_weights(model: Any, args: "RopeSFTConfig") -> Iterator[None]:
    """Inside, TRL refuses a model given by name whose weights are missing, misshapen or damaged.

    Under ZeRO-3 ranks load parts, and Transformers' own warning is all there is. Who gives `ignore_mismatched_sizes`
    or a class of their own (`architecture`) in `model_init_kwargs` gets what TRL makes of it. `args` is as before in
    the end.
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
