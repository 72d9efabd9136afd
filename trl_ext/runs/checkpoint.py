"""Checks, before anything is loaded, that a name leads to a checkpoint. Imports nothing heavy."""

from pathlib import Path
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def base_of_adapter(name: str | Path) -> str | None:
    """The base model of the adapter in the folder `name`, None if there is no adapter.

    Raises:
        ValueError: the adapter's config names none, or is no JSON.
    """
    if not (Path(name) / ADAPTER_CONFIG).is_file():
        return None
    from rope_patch.export.sources import base_of

    return base_of(Path(name))


def require_no_adapter(name: str, argument: str) -> None:
    """Raise ValueError if `name` is the folder of an adapter, without the weights of a whole model beside it."""
    folder = Path(name)
    if not (folder / ADAPTER_CONFIG).is_file() or any(any(folder.glob(weights)) for weights in _WEIGHTS):
        return
    raise ValueError(
        f"{argument}: {name} is an adapter of {base_of_adapter(name)}, not a model. `rope-patch export {name} "
        "--output FOLDER` merges the two into a model."
    )


def require_folder_or_id(name: str, argument: str) -> None:
    """Raise ValueError if `name` is no folder and cannot be a hub id either, without a request to the hub.

    Args:
        name: as the user gave it.
        argument: the user's argument or option, for messages.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not name:  # Path("") is the current folder
        raise ValueError(f"{argument} must be a hub id or the folder of a checkpoint, got an empty name.")
    folder = Path(name)
    if folder.is_dir():
        return
    if folder.is_file():
        raise ValueError(f"{argument}: {name} is a file: name the folder of the checkpoint, or a hub id.")
    try:
        validate_repo_id(name)
        # old hub ids without an owner, such as gpt2, are of models without RoPE, and exist with an owner too
        is_id = "/" in name
    except HFValidationError:
        is_id = False
    if not is_id:
        raise ValueError(
            f"{argument}: there is no folder {name}, and a hub id has the form OWNER/NAME. Check the name and the "
            "current folder."
        )


def require_checkpoint(name: str, argument: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of a checkpoint on the hub or in a folder.

    Args:
        name: hub id or folder.
        argument: the user's argument or option, for messages.
        revision: on the hub; None is the newest.
        trust_remote_code: run code that the checkpoint brings.

    Raises:
        ValueError: there is no such checkpoint, its weights are in parts, this version of Transformers does not know
            the model, or it needs code of its own and `trust_remote_code` is False.
    """
    require_folder_or_id(name, argument)
    from transformers import AutoConfig

    from rope_patch.base.remote_code import load_pretrained
    from rope_patch.checkpoints.weights_in_parts import require_whole_weights

    folder = Path(name)
    require_whole_weights(folder, argument)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{argument}: {name} is a folder without config.json: it holds no checkpoint.")
    try:
        options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        return load_pretrained(AutoConfig, name, argument, **options)
    except OSError as error:
        checkpoint = name if revision in (None, "main") else f"{name} at revision {revision}"
        reason = f"{checkpoint} is no folder with a checkpoint, and from the hub: {error}"
        raise ValueError(f"{argument}: {reason}") from error


def trusts_code(training: Any) -> bool:
    """Whether a `RopeSFTConfig` lets a model run its own code; as in TRL, an argument of loading wins."""
    trusted: bool = (training.model_init_kwargs or {}).get("trust_remote_code", training.trust_remote_code)
    return trusted


def require_tokenizer(name: str, argument: str) -> None:
    """Raise ValueError if `name` is a folder without a tokenizer, as `save_pretrained` of a model alone makes it.

    Args:
        name: hub id or folder of a checkpoint. Hub ids pass.
        argument: the user's argument or option, for messages.
    """
    from rope_patch.checkpoints.files_beside import tokenizer_files

    if Path(name).is_dir() and not tokenizer_files(name):
        raise ValueError(
            f"{argument}: {name} is a folder without a tokenizer. Save that of its base model there: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({name!r})."
        )
