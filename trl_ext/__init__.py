"""Trainers on top of TRL for models patched by rope_patch, and the command line."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RopeSFTConfig
    from .data.cues import append_cue
    from .extension.extending import extend
    from .recipes.fine_tuning import train_recipe
    from .recipes.recipe import RecipeParser
    from .trainer.trainer import RopeSFTTrainer

__all__ = ["RecipeParser", "RopeSFTConfig", "RopeSFTTrainer", "append_cue", "extend", "train_recipe"]

_HOMES = {
    "RopeSFTConfig": "config",
    "RopeSFTTrainer": "trainer.trainer",
    "append_cue": "data.cues",
    "RecipeParser": "recipes.recipe",
    "extend": "extension.extending",
    "train_recipe": "recipes.fine_tuning",
}


def __getattr__(name: str) -> Any:
    """Import TRL only when a trainer is asked for: `rope-patch --help` should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import trl  # noqa: F401  # alone, so that only its absence is blamed on the extra
    except ImportError as error:
        raise ImportError("trl_ext needs TRL: pip install 'rope-patch[trl]'.") from error
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
