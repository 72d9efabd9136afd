"""What is exported: a loaded model, or a checkpoint or adapter in a folder or on the hub."""

from pathlib import Path

from torch import nn

from ..adapters.sidecar import SIDECAR_NAME, read_adapter_config, require_no_lost_sidecar, require_no_named_adapters
from ..checkpoints.checked_loading import load_checkpoint, with_adapter
from ..checkpoints.weights_in_parts import require_whole_weights


def load(source: str | Path, revision: str | None = None) -> nn.Module:
    """The model in `source` on the CPU; for an adapter its base model with the adapter and the RoPE of its training.

    Args:
        source: folder or hub id.
        revision: of a model on the hub, None for "main".

    Raises:
        OSError: there is none, adapters by name, or an adapter without its weights or the file that says its RoPE.
        ValueError: its weights are in parts, damaged, or not all that the model has.
    """
    folder = Path(source)
    require_whole_weights(folder, "model")
    if not (folder / "adapter_config.json").is_file():
        if not folder.is_dir():
            _require_no_adapter(str(source), revision)
        elif not (folder / "config.json").is_file():
            require_no_named_adapters(folder)
        return load_checkpoint(source, revision=revision)
    if not (folder / SIDECAR_NAME).is_file():
        require_no_lost_sidecar(folder)
    base = load_checkpoint(base_of(folder), revision=revision_of_base(folder))
    return with_adapter(base, folder)


def revision_of_base(adapter: Path) -> str:
    """The revision of the base model on the hub that an adapter was trained on."""
    return read_adapter_config(adapter).get("revision") or "main"


def base_of(adapter: Path) -> str:
    """The base model that an adapter names."""
    named: str | None = read_adapter_config(adapter).get("base_model_name_or_path")
    if not named:
        raise ValueError(
            f"{adapter / 'adapter_config.json'} names no base model (base_model_name_or_path): write its folder or hub "
            "id there, or load it, put the adapter on it with load_adapter, and give rope_patch.export the model."
        )
    return named


def _require_no_adapter(name: str, revision: str | None) -> None:
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(name, revision=revision) is not None:
        raise ValueError(
            f"{name} is an adapter on the hub: download it with huggingface_hub.snapshot_download and name the folder."
        )
