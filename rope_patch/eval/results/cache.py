"""Results kept on disk, so that an interrupted evaluation goes on where it stopped."""

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
_LAYOUT = 7  # of what measures keep; another number where an earlier value could not be read, or is another figure


def model_hash(model: nn.Module) -> str:
    """SHA-256 over weights, buffers (RoPE frequencies among them), config and what is not in these; any bit counts.

    What is not in these: scales of adapters and which are active, tokens that end an answer, and STRING's positions.

    Each tensor is reduced on its own device to two sums of its mixed bits times odd numbers, modulo 2**64, so that a
    model on a GPU is hashed at the speed of its memory and never copied. RoPE frequencies that a forward picks by the
    length of its row are left out: those that it picks from count.
    """
    digest = hashlib.sha256(json.dumps(find_causal_lm(model).config.to_dict(), sort_keys=True, default=str).encode())
    picked = {
        id(buffer)
        for _, module in named_rotary_modules(model)
        for name, buffer in module.named_buffers(recurse=False)
        if is_recomputed(module, name)
    }
    tensors = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if id(t) not in picked}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(f"{_bit_sums(tensor)}".encode())
    beside = _beside(model)
    if beside:
        digest.update(json.dumps(beside, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _beside(model: nn.Module) -> list[Any]:
    """What changes a model's answers and is neither a tensor nor in its config; empty of most models."""
    causal_lm: Any = find_causal_lm(model)
    found: list[Any] = []
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)  # of a PEFT layer a dictionary, of attention a number
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
    """SHA-256 over the names and contents of a file, or of the files in a folder.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"there is no file or folder {root}.")
    files = sorted(p for p in root.iterdir() if p.is_file()) if root.is_dir() else [root]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


Remember = Callable[[dict[str, Any], Callable[[], dict[str, Any]]], dict[str, Any]]
"""(what the value depends on, how to measure it) -> the value, now or from an earlier run."""


def afresh(key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A `Remember` without memory."""
    return make()


class ResultCache:
    """JSON values by key in a folder; each is written whole or not at all.

    Args:
        folder: where they are; made when first written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def get(self, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The value stored for `key`, or that of `make()`, which is stored; one that is damaged is measured again.

        Args:
            key: everything that the value depends on; versions of rope-patch, Transformers and lm-eval are added.
            make: measures it.
        """
        key = _whole(key)
        file = self._file(key)
        kept = self._kept(key)
        if kept is not None:
            return kept
        if file.is_file():
            tell(f"{file} is damaged, and is measured again.")
        value = make()
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as beside:
            beside.write_text(json.dumps({"key": key, "value": value}), encoding="utf-8")
        return value

    def has(self, key: dict[str, Any]) -> bool:
        """Whether a value is stored for `key`, as `get` takes it."""
        return self._kept(_whole(key)) is not None

    def _kept(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The value that is stored for exactly this key; None without one, or where its file is damaged."""
        try:
            kept = json.loads(self._file(key).read_text(encoding="utf-8"))
            return kept["value"] if kept["key"] == json.loads(json.dumps(key)) else None
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None

    def _file(self, key: dict[str, Any]) -> Path:
        return self.folder / f"{data_hash(key)}.json"


def _whole(key: dict[str, Any]) -> dict[str, Any]:
    return {**key, "layout": _LAYOUT, **installed_versions("transformers", "lm_eval")}


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Other words for other words: the highest bit of one, a sign, would count 2**63 in any sum, twice nothing."""
    for odd in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        words = words * odd
        words = words ^ (words >> 32)
    return words


def _bit_sums(tensor: torch.Tensor) -> list[int]:
    flat = tensor.contiguous().flatten().view(torch.uint8)
    width = 8 if flat.numel() % 8 == 0 else 1
    words = flat.view(torch.int64) if width == 8 else flat
    sums = [0, 0]
    for first in range(0, words.numel(), _CHUNK):
        part = _mixed(words[first : first + _CHUNK].to(torch.int64))
        index = torch.arange(first, first + part.numel(), device=part.device)
        for k, odd in enumerate((0x9E3779B97F4A7C15 - (1 << 64), 0x27D4EB2F165667C5)):
            # wraps modulo 2**64; the weight of every place is odd, so one changed word always changes the sum
            weight = (index * odd) | 1
            sums[k] = (sums[k] + int((part * weight).sum().item())) & ((1 << 64) - 1)
    return sums
