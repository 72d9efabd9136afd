"""Checkpoints whose weights are in parts, as ranks of a training wrote them. Imports no torch."""

import shlex
from pathlib import Path

_WHOLE = ("*model*.safetensors", "*pytorch_model*.bin", "adapter_model.bin")
_FSDP = "pytorch_model_fsdp_0"  # accelerate's name for the weights of the first model
_ZERO = "zero_to_fp32.py"  # a script that DeepSpeed writes beside weights


def require_whole_weights(folder: str | Path, argument: str) -> None:
    """Raise ValueError, with the command that joins them, if all weights in `folder` are in parts.

    Args:
        folder: of a checkpoint; a hub ID passes.
        argument: name of the user's argument, for the message.
    """
    at, here = Path(folder), shlex.quote(str(folder))
    # pytorch_model_fsdp.bin is for resuming with FSDP, which alone loads it
    if any(file.stem != "pytorch_model_fsdp" for pattern in _WHOLE for file in at.glob(pattern)):
        return
    if (at / _ZERO).is_file():
        command = f"python {here}/{_ZERO} {here} {here} --safe_serialization"
    elif (at / _FSDP).is_dir():
        command = f"accelerate merge-weights {here}/{_FSDP} {here}"
        if (at / "adapter_config.json").is_file():
            command += f" && mv {here}/model.safetensors {here}/adapter_model.safetensors"
    else:
        return
    raise ValueError(f"{argument}: the weights in {folder} are in parts, as the ranks saved them. Run `{command}`.")
