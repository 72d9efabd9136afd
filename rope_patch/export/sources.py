"""Loading the checkpoint or adapter that is exported, from a folder or from the hub."""

from pathlib import Path

from torch import nn
from transformers.utils import find_adapter_config_file

from ..adapters.sidecar import SIDECAR_NAME, read_adapter_config, require_no_lost_sidecar, require_no_named_adapters
from ..checkpoints.checked_loading import load_checkpoint, with_adapter
from ..checkpoints.weights_in_parts import require_whole_weights


def load(source: str | Path, revision: str | None = None) -> nn.Module:
    """Load the model in `source` on the CPU. An adapter comes on its base model, with the RoPE of its training.

    Args:
        source: folder or hub ID.
        revision: of a model on the hub; None is "main".

    Raises:
        OSError: there is no model, only named adapters in subfolders, or an adapter without weights or sidecar.
        ValueError: the weights are in parts, damaged or incomplete.
    """
    folder = Path(source)
    require_whole_weights(folder, "model")
    if not (folder / "adapter_config.json").is_file():
        if not folder.is_dir():
            if find_adapter_config_file(str(source), revision=revision) is not None:
                raise ValueError(
                    f"{source} is an adapter on the hub: download it with huggingface_hub.snapshot_download and name "
                    "the folder."
                )
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
