"""Writing weights in shards, into a folder that gets its name when it is complete."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..base.empty_folders import without_empty_folders
from ..checkpoints.full_disk import disk_full_errors

logger = logging.get_logger(__name__)

_LAYER = re.compile(r"^(.*?\.\d+)\.")  # "model.layers.0" of "model.layers.0.mlp.up_proj.weight"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, whose files become those of `folder` when the block ends.

    If the block raises, they are deleted, with the parents of `folder` that were made. An empty `folder` that exists is
    filled and not replaced: it may be a mount, the working directory, or the target of a link.

    Raises:
        FileExistsError: `folder` is a file, or is not empty.
        FullDisk: it cannot be written.
    """
    for unfinished in unfinished_folders(folder):
        logger.warning(
            f"{unfinished} was left by a process that was killed while it wrote {folder}, or another process is "
            "writing it now: delete it if no process is."
        )
    exists = folder.exists()
    if exists and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder: name a new one to export to.")
    named, folder = folder, folder.resolve()
    around = folder if exists else folder.parent
    with without_empty_folders(around):
        around.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=around))
        try:
            written = unfinished / folder.name  # llama.cpp's converter names the model after the folder
            written.mkdir()
            with disk_full_errors(named):
                yield written
            if exists:
                # the config last: if this is killed half-way, the folder is no checkpoint
                for file in sorted(written.iterdir(), key=lambda file: file.name == "config.json"):
                    file.rename(folder / file.name)
            else:
                written.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def unfinished_folders(folder: Path) -> list[Path]:
    """Temporary folders of `whole_folder` for `folder`, of processes that were killed or still run."""
    folder = folder.resolve()
    around = [place for place in (folder, folder.parent) if place.is_dir()]
    return [path for place in around for path in place.iterdir() if path.name.startswith(_prefix(folder))]


def _prefix(folder: Path) -> str:
    return f".{folder.name}-unfinished-"


def by_layer(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Weights grouped by layer, because converting them to the form of the files may join or split them."""

    def layer(item: tuple[str, torch.Tensor]) -> str:
        match = _LAYER.match(item[0])
        return match.group(1) if match else item[0]

    for _, group in groupby(weights, key=layer):
        yield dict(group)


class ShardWriter:
    """Writes tensors into safetensors files of at most `max_bytes` each, unless one tensor is larger.

    Args:
        folder: to write into.
        max_bytes: of one file.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.shard: dict[str, torch.Tensor] = {}
        self.shard_bytes = 0
        self.total_bytes = 0
        self.files: list[list[str]] = []  # names of the tensors in each file

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Put `tensor` into this shard or, if that is full, into the next one."""
        size = tensor.numel() * tensor.element_size()
        if self.shard and self.shard_bytes + size > self.max_bytes:
            self._flush()
        self.shard[name] = tensor.cpu().contiguous()
        self.shard_bytes += size
        self.total_bytes += size

    def finish(self) -> None:
        """Write the last shard and, if there are several, the index of which file holds which tensor."""
        self._flush()
        count = len(self.files)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        umask = os.umask(0)  # can only be read by setting it
        os.umask(umask)
        for i, name in enumerate(names):
            (self.folder / f"shard-{i}").chmod(0o666 & ~umask)  # safetensors makes files that only the owner can read
            (self.folder / f"shard-{i}").rename(self.folder / name)
        if count > 1:
            index: dict[str, Any] = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {tensor: name for name, held in zip(names, self.files, strict=True) for tensor in held},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.shard, self.folder / f"shard-{len(self.files)}", metadata={"format": "pt"})
        self.files.append(list(self.shard))
        self.shard, self.shard_bytes = {}, 0
