"""What is exported: a loaded model, or a checkpoint or adapter in a folder or on the hub; and its tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from ..checkpoints import load_checkpoint, with_adapter
from ..sidecar import SIDECAR_NAME, require_no_lost_sidecar, require_no_named_adapters
from ..weights_in_parts import require_whole_weights

logger = logging.get_logger(__name__)

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", "chat_template*", "additional_chat_templates/*.jinja", "*processor_config.json",
)  # fmt: skip


def load(source: str | Path) -> nn.Module:
    """The model in `source` on the CPU; for an adapter its base model with the adapter and the RoPE of its training.

    Raises:
        OSError: there is none, adapters by name, or an adapter without its weights or the file that says its RoPE.
        ValueError: its weights are in parts, damaged, or not all that the model has.
    """
    folder = Path(source)
    require_whole_weights(folder, "model")
    if not (folder / "adapter_config.json").is_file():
        if not folder.is_dir():
            _require_no_adapter(str(source))
        elif not (folder / "config.json").is_file():
            require_no_named_adapters(folder)
        return load_checkpoint(source)
    if not (folder / SIDECAR_NAME).is_file():
        require_no_lost_sidecar(folder)
    base = load_checkpoint(base_of(folder), revision=revision_of_base(folder))
    return with_adapter(base, folder)


def revision_of_base(adapter: Path) -> str:
    """The revision of the base model on the hub that an adapter was trained on."""
    return _config_of(adapter).get("revision") or "main"


def _config_of(adapter: Path) -> dict[str, Any]:
    file = adapter / "adapter_config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}. Copy it again from where the adapter was saved.") from error
    return config


def base_of(adapter: Path) -> str:
    """The base model that an adapter names."""
    named: str | None = _config_of(adapter).get("base_model_name_or_path")
    if not named:
        raise ValueError(
            f"{adapter / 'adapter_config.json'} names no base model (base_model_name_or_path): write its folder or hub "
            "id there, or load it, put the adapter on it with load_adapter, and give rope_patch.export the model."
        )
    return named


def _require_no_adapter(name: str) -> None:
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(name) is not None:
        raise ValueError(
            f"{name} is an adapter on the hub: download it with huggingface_hub.snapshot_download and name the folder."
        )


def copy_tokenizer(sources: list[tuple[str, str | None]], folder: Path) -> bool:
    """Copy the tokenizer's files of the first source that has any, as they are; whether there were any.

    Args:
        sources: a folder or hub id each, "" for none, and its revision on the hub, None for the newest.
        folder: to copy them to.
    """
    for source, revision in sources:
        if not source:
            continue
        there = _local(source, revision)
        files = tokenizer_files(there) if there.is_dir() else []
        for file in files:
            copied = folder / file.relative_to(there)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copied)  # and not its mode: of a source that is read-only, no file could be changed
        if files:
            return True
    logger.warning("No tokenizer was found to go with the checkpoint: save it there with tokenizer.save_pretrained.")
    return False


def tokenizer_files(source: str | Path, revision: str | None = None) -> list[Path]:
    """Those of a tokenizer in a folder or a repository on the hub; none where there are none, or no such source."""
    folder = _local(source, revision)
    return [file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()]


def _local(source: str | Path, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=list(_TOKENIZER_FILES)))
    except (OSError, ValueError):  # no such repository or revision, or no network
        return Path(source)
