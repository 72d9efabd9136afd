"""The window that files beside a checkpoint's config name.

Tokenizers truncate at `model_max_length`, and vLLM serves no longer texts. `generate` takes no longer prompts than the
`max_length` of the generation config, where one is named, as for Llama 2.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from ..base.json_records import read_record
from ..forward.state import state_of
from ..rescalings.in_place import pretrained_window
from ..rope.rotary import find_decoder

logger = logging.get_logger(__name__)

_TOKENIZER = ("tokenizer_config.json", "model_max_length")
_GENERATION = ("generation_config.json", "max_length")


def widen_tokenizer_of(folder: Path, model: nn.Module, window: int | None = None) -> None:
    """`widen_tokenizer` from the window that a model was pretrained on to `window`, None for that of its config.

    Args:
        folder: with a tokenizer or without.
        model: bare or wrapped, patched or loaded from a checkpoint of a patched one. That names the pretrained window
            in its RoPE parameters under 'yarn', 'llama3' and 'longrope' alone: with others it changes nothing.
        window: that the checkpoint declares.
    """
    decoder: Any = find_decoder(model)
    state = state_of(decoder)
    before = decoder.config if state is None else state.native
    declared = getattr(decoder.config, "max_position_embeddings", None)
    native = pretrained_window(before.rope_parameters, getattr(before, "max_position_embeddings", None))
    widen_tokenizer(folder, native, declared if window is None else window)


def widen_tokenizer(folder: Path, native: int | None, window: int | None) -> None:
    """Let tokenizer and generation config in `folder` name `window`, if they name the native window or more.

    A smaller number was not taken from the model, and a larger one than `window` stops nothing.

    Args:
        folder: with a tokenizer or without, and with a generation config or without.
        native: window of the model as it came, None if its config names none.
        window: that of the checkpoint.
    """
    if native is None or window is None:
        return
    for name, key in (_TOKENIZER, _GENERATION):
        _write(folder / name, key, window, lambda named: native <= named < window)


def narrow_tokenizer(folder: Path, declared: int | None, window: int | None) -> None:
    """Let tokenizer and generation config in `folder` name `window` where they name `declared`, which is more.

    Args:
        folder: with a tokenizer or without, and with a generation config or without.
        declared: window of the checkpoint whose tokenizer it is, None if its config names none.
        window: that is promised in its place, None for the same.
    """
    if declared is None or window is None or window >= declared:
        return
    for name, key in (_TOKENIZER, _GENERATION):
        _write(folder / name, key, window, lambda named: named == declared)


def warn_of_short_tokenizer(folder: Path, window: int | None) -> None:
    """Say so if the tokenizer in `folder` still names less than `window`.

    So it does beside a checkpoint of a model that was rescaled by 'ntk', 'abf' or 'pi', which does not say where it
    began, and so it does where the user meant it.
    """
    name, key = _TOKENIZER
    named = _read(folder / name).get(key)
    if window is not None and isinstance(named, int | float) and named < window:
        logger.warning(
            f"The tokenizer names {named} positions ({key} in {name}) and the config {window}: vLLM serves no longer "
            f"texts than both allow. If the model was rescaled, write {window} there."
        )


def _write(file: Path, key: str, window: int, is_meant: Callable[[float], bool]) -> None:
    """Put `window` in place of a number in a JSON file that is meant."""
    config = _read(file)
    named = config.get(key)
    if isinstance(named, int | float) and is_meant(named):
        config[key] = window
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    """A JSON file; nothing of one that is not there."""
    return read_record(file, "Save the tokenizer or the model again.") if file.is_file() else {}
