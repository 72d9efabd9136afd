"""Checkpoints whose weights lie in parts, as ranks of a training wrote them: what makes them plain. Imports nothing."""

import shlex
from pathlib import Path

_WHOLE = ("*model*.safetensors", "*pytorch_model*.bin", "adapter_model.bin")
_FSDP = "pytorch_model_fsdp_0"  # accelerate's name for the weights of the first model
_ZERO = "zero_to_fp32.py"  # which DeepSpeed puts beside the weights that it has saved


def require_whole_weights(folder: str | Path, argument: str) -> None:
    """Raise ValueError if `folder` has weights in parts alone, with the command that makes one file of them.

    Args:
        folder: of a checkpoint; what is no folder passes.
        argument: what the user gave it as, for the message.
    """
    at = Path(folder)
    # FSDP writes weights for going on, whole ones too, as pytorch_model_fsdp.bin, which nobody else loads
    whole = [file for pattern in _WHOLE for file in at.glob(pattern) if file.stem != "pytorch_model_fsdp"]
    command = None if whole else _command(at)
    if command is not None:
        raise ValueError(f"{argument}: the weights in {folder} are in parts, as the ranks saved them. Run `{command}`.")


def _command(folder: Path) -> str | None:
    here = shlex.quote(str(folder))
    if (folder / _ZERO).is_file():
        return f"python {here}/{_ZERO} {here} {here} --safe_serialization"
    if not (folder / _FSDP).is_dir():
        return None
    merge = f"accelerate merge-weights {here}/{_FSDP} {here}"
    if (folder / "adapter_config.json").is_file():
        return f"{merge} && mv {here}/model.safetensors {here}/adapter_model.safetensors"
    return merge
