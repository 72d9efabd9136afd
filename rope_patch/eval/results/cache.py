"""Results stored on disk, so that an interrupted evaluation continues where it stopped."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...attention.string_positions import string_in_force
from ...base.environment import installed_versions
from ...checkpoints.full_disk import whole_file
from ...rope.rotary import find_causal_lm, is_recomputed, named_rotary_modules
from .progress import tell

_CHUNK = 1 << 24  # values hashed at once
_LAYOUT = 7  # part of every key: raise it when stored values change their form or meaning


def model_hash(model: nn.Module) -> str:
    """SHA-256 over all that determines a model's answers; every bit counts.

    That is weights, buffers (with the RoPE frequencies), config, scales and state of adapters, end tokens, and STRING's
    positions. Each tensor is reduced on its own device to two sums of its mixed bits times odd numbers, modulo 2**64,
    so a model on a GPU is hashed at the speed of its memory and never copied. Frequencies that a forward pass derives
    from the length of its row are left out, because the ones that they are derived from are hashed.
    """
    digest = hashlib.sha256(json.dumps(find_causal_lm(model).config.to_dict(), sort_keys=True, default=str).encode())
    recomputed = {
        id(buffer)
        for _, module in named_rotary_modules(model)
        for name, buffer in module.named_buffers(recurse=False)
        if is_recomputed(module, name)
    }
    tensors = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if id(t) not in recomputed}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(f"{_bit_sums(tensor)}".encode())
    extra = _hidden_state(model)
    if extra:
        digest.update(json.dumps(extra, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _hidden_state(model: nn.Module) -> list[Any]:
    """State that changes a model's answers and is neither a tensor nor in its config; empty for most models."""
    causal_lm: Any = find_causal_lm(model)
    found: list[Any] = []
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)  # a dictionary in PEFT layers, a number in attention layers
        if isinstance(scaling, dict):
            found.append([name, scaling, getattr(module, "active_adapters", None), getattr(module, "merged", None)])
            found.append(getattr(module, "disable_adapters", None))
    ends = getattr(getattr(causal_lm, "generation_config", None), "eos_token_id", None)
    if ends != getattr(causal_lm.config, "eos_token_id", None):
        found.append(["ends", ends])
    string = string_in_force(model)
    if string is not None:
        found.append(["string", string])
    return found


def data_hash(*data: Any) -> str:
    """SHA-256 over tensors, strings and JSON values."""
    digest = hashlib.sha256()
    for item in data:
        if isinstance(item, torch.Tensor):
            digest.update(f"{tuple(item.shape)} {item.dtype}".encode())
            digest.update(item.cpu().contiguous().numpy().tobytes())
        else:
            digest.update(json.dumps(item, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def files_hash(path: str | Path) -> str:
    """SHA-256 over the names and contents of a file, or of the files below a folder; FileNotFoundError without it."""
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"there is no file or folder {root}.")
    # Python writes .pyc files beside the tasks of lm-eval
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc") if root.is_dir() else [root]
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(root) if root.is_dir() else file.name
        with file.open("rb") as content:
            digest.update(f"{name} {hashlib.file_digest(content, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


Remember = Callable[[dict[str, Any], Callable[[], dict[str, Any]]], dict[str, Any]]
"""(key, function that measures the value) -> the value, stored by an earlier run or measured now."""


def afresh(key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A `Remember` that stores nothing."""
    return make()


class ResultCache:
    """JSON values by key, one file each. A file is written whole or not at all.

    Args:
        folder: folder of the files; it is made with the first of them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def get(self, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The value stored for `key`; if there is none, or its file is damaged, `make()` measures and stores it.

        Args:
            key: everything that the value depends on, apart from the versions of Transformers and lm-eval.
            make: measures the value.
        """
        file, key, stored = self._lookup(key)
        if stored is not None:
            return stored
        if file.is_file():
            tell(f"{file} is damaged. Its result is measured again.")
        value = make()
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as temporary:
            temporary.write_text(json.dumps({"key": key, "value": value}), encoding="utf-8")
        return value

    def has(self, key: dict[str, Any]) -> bool:
        """Whether a value is stored for `key`."""
        return self._lookup(key)[2] is not None

    def _lookup(self, key: dict[str, Any]) -> tuple[Path, dict[str, Any], dict[str, Any] | None]:
        """File, key with versions, and value; the value is None if the file is missing, damaged or of another key."""
        key = {**key, "layout": _LAYOUT, **installed_versions("transformers", "lm_eval")}
        file = self.folder / f"{data_hash(key)}.json"
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            return file, key, stored["value"] if stored["key"] == json.loads(json.dumps(key)) else None
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return file, key, None


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each int64 word, one to one.

    Unmixed, the sign bits of two words would cancel in a sum modulo 2**64, because each is worth 2**63.
    """
    for odd in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        words = words * odd
        words = words ^ (words >> 32)
    return words


def _bit_sums(tensor: torch.Tensor) -> list[int]:
    flat = tensor.contiguous().flatten().view(torch.uint8)
    width = 8 if flat.numel() % 8 == 0 else 1  # bytes of a word
    words = flat.view(torch.int64) if width == 8 else flat
    sums = [0, 0]
    for first in range(0, words.numel(), _CHUNK):
        part = _mixed(words[first : first + _CHUNK].to(torch.int64))
        index = torch.arange(first, first + part.numel(), device=part.device)
        for k, odd in enumerate((0x9E3779B97F4A7C15 - (1 << 64), 0x27D4EB2F165667C5)):  # in the range of int64
            # int64 wraps modulo 2**64; all weights are odd, so a change of one word always changes the sum
            weight = (index * odd) | 1
            sums[k] = (sums[k] + int((part * weight).sum().item())) & ((1 << 64) - 1)
    return sums
