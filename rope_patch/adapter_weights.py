"""Which weights a specification of RoPE belongs to: a digest of an adapter's tensors."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn


def digest(tensors: Iterable[torch.Tensor]) -> str | None:
    """SHA-256 of the tensors as a set; None if one of them is a shard of a larger one, or holds no values.

    Names and order do not count: Transformers and PEFT write the same adapter under different ones.
    """
    parts = set()
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or hasattr(tensor, "ds_id"):
            return None
        of_tensor = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        of_tensor.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        parts.add(of_tensor.digest())
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest() if parts else None


def digest_of_folder(directory: str | os.PathLike[str]) -> str | None:
    """The same of the adapter that was saved in `directory`; None if there is none."""
    return digest(_saved(Path(directory)))


def _saved(directory: Path) -> Iterator[torch.Tensor]:
    files = sorted(directory.glob("adapter_model*.safetensors"))
    for file in files:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield tensors.get_tensor(name)
    if not files and (file := directory / "adapter_model.bin").is_file():
        yield from torch.load(file, map_location="cpu", weights_only=True).values()
