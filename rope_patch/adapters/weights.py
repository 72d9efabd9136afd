"""The tensors of an adapter in a folder: their shapes, and the digest that `rope_patch.json` records."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

_SAVE_AGAIN = "Save the adapter again with save_pretrained, which writes adapter_model.safetensors."


def digest(tensors: Iterable[torch.Tensor]) -> str | None:
    """SHA-256 of the tensors as a set; None if one of them is a shard of a larger one, or has no values.

    Names and order do not count, because Transformers and PEFT use different ones for the same adapter.
    """
    parts = set()
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or hasattr(tensor, "ds_id"):
            return None
        sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        parts.add(sha.digest())
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest() if parts else None


def digest_of_folder(directory: str | os.PathLike[str]) -> str | None:
    """The digest of the adapter that was saved in `directory`; None if there is none."""
    from safetensors import safe_open

    def saved() -> Iterator[torch.Tensor]:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield tensors.get_tensor(name)

    files = _safetensors(Path(directory))
    return digest(saved() if files else _pickled(Path(directory)).values())


def shapes_in_folder(directory: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor of the adapter that was saved in `directory`."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in _safetensors(Path(directory)):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes or {name: tuple(tensor.shape) for name, tensor in _pickled(Path(directory)).items()}


def _safetensors(directory: Path) -> list[Path]:
    return sorted(directory.glob("adapter_model*.safetensors"))


def _pickled(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter that was saved without safetensors; {} if there are none.

    Raises:
        ValueError: the file is damaged, or holds more than tensors, and loading it would run code.
    """
    file = directory / "adapter_model.bin"
    if not file.is_file():
        return {}
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the kind of error depends on the damaged bytes
        raise ValueError(f"{file} is damaged, or holds code beside tensors, which is not run. {_SAVE_AGAIN}") from error
    if not isinstance(saved, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in saved.values()):
        raise ValueError(f"{file} must hold tensors by name, got a {type(saved).__name__}. {_SAVE_AGAIN}")
    return saved
