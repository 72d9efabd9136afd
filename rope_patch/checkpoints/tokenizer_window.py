"""The context window in the tokenizer's and generation config of a checkpoint.

Tokenizers truncate at `model_max_length`, and vLLM serves no longer texts. `generate` takes no prompts beyond the
`max_length` of the generation config, if it has one, as for Llama 2.
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
    """Let tokenizer and generation config in `folder` name `window`, if they name the pretrained window or more.

    A smaller number was not taken from the model, and a number from `window` on does not limit anything.

    Args:
        folder: with or without a tokenizer and a generation config.
        model: bare or wrapped, patched or loaded from a checkpoint of a patched model. Such a checkpoint has the
            pretrained window in its RoPE parameters under 'yarn', 'llama3' and 'longrope'; under other types nothing
            changes.
        window: context window of the checkpoint, in positions; None is that of the model's config.
    """
    decoder: Any = find_decoder(model)
    state = state_of(decoder)
    before = decoder.config if state is None else state.native
    declared = getattr(decoder.config, "max_position_embeddings", None)
    native = pretrained_window(before.rope_parameters, getattr(before, "max_position_embeddings", None))
    reach = declared if window is None else window
    if native is not None and reach is not None:
        _replace(folder, reach, lambda named: native <= named < reach)


def narrow_tokenizer(folder: Path, declared: int | None, window: int | None) -> None:
    """Let tokenizer and generation config in `folder` name `window` if they name `declared`, which is more.

    Args:
        folder: with or without a tokenizer and a generation config.
        declared: context window of the checkpoint that the tokenizer came with; None if its config names none.
        window: the smaller window that is promised; None is `declared`.
    """
    if declared is not None and window is not None and window < declared:
        _replace(folder, window, lambda named: named == declared)


def warn_of_short_tokenizer(folder: Path, window: int | None) -> None:
    """Warn if the tokenizer in `folder` names less than `window`.

    This happens after rescaling by 'ntk', 'abf' or 'pi', whose checkpoints do not have the pretrained window, or
    because the user chose it.
    """
    name, key = _TOKENIZER
    named = _read(folder / name).get(key)
    if window is not None and isinstance(named, int | float) and named < window:
        logger.warning(
            f"The tokenizer names {named} positions ({key} in {name}) and the config {window}: vLLM serves no longer "
            f"texts than both allow. If the model was rescaled, write {window} there."
        )


def _replace(folder: Path, window: int, is_replaced: Callable[[float], bool]) -> None:
    """Write `window` into the two configs if the number there is one to replace."""
    for name, key in (_TOKENIZER, _GENERATION):
        config = _read(folder / name)
        named = config.get(key)
        if isinstance(named, int | float) and is_replaced(named):
            config[key] = window
            text = json.dumps(config, indent=2, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    """A JSON file; {} if it does not exist."""
    return read_record(file, "Save the tokenizer or the model again.") if file.is_file() else {}
