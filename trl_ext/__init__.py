"""Trainers on top of TRL for models patched by rope_patch."""

try:
    import trl as _trl  # noqa: F401  # named here, so that the error below is about the extra alone
except ImportError as error:
    raise ImportError("trl_ext needs TRL: pip install 'rope-patch[trl]'.") from error

from .config import RopeSFTConfig
from .trainer import RopeSFTTrainer

__all__ = ["RopeSFTConfig", "RopeSFTTrainer"]
