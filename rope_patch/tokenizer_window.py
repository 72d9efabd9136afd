"""The window that files beside a checkpoint's config name.

Tokenizers truncate at `model_max_length`, and vLLM serves no longer texts. `generate` takes no longer prompts than the
`max_length` of the generation config, where one is named, as for Llama 2.
"""

import json
from pathlib import Path

from torch import nn

from .rotary import find_decoder
from .state import state_of


def widen_tokenizer_of(folder: Path, model: nn.Module, window: int | None = None) -> None:
    """`widen_tokenizer` from the native window of a patched model to `window`, None for that of its config.

    Args:
        folder: with a tokenizer or without.
        model: bare or wrapped; one that is not patched changes nothing.
        window: that the checkpoint declares.
    """
    state = state_of(find_decoder(model))
    if state is not None:
        declared = state.current.max_position_embeddings if window is None else window
        widen_tokenizer(folder, state.native.max_position_embeddings, declared)


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
    for name, key in (("tokenizer_config.json", "model_max_length"), ("generation_config.json", "max_length")):
        file = folder / name
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        named = config.get(key)
        if isinstance(named, int | float) and native <= named < window:
            config[key] = window
            file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
