"""Files beside a model's weights that go where these go: its tokenizer, and the texts of its license."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

Source = tuple[str, str | None]
"""A folder or hub id, "" for none, and its revision on the hub, None for the newest."""

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", "chat_template*", "additional_chat_templates/*.jinja", "*processor_config.json",
)  # fmt: skip
# ends of the names of those that go with a vocabulary and have none
_WITHOUT_VOCABULARY = (
    "_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", ".jinja",
)  # fmt: skip
# in capitals or not, also for the hub, whose patterns tell them apart
LICENSE_FILES = tuple(
    "".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in name) + "*"
    for name in ("license", "licence", "notice", "copying", "use_policy")
)


def copy_tokenizer(sources: Iterable[Source], folder: Path) -> Source | None:
    """Copy a tokenizer's files as they are, each from the first source that has it; the source of its vocabulary.

    An adapter may have a chat template of its own beside it, and no tokenizer: that is then the next source's.
    """
    for source in sources:
        there, files = _files(*source, _TOKENIZER_FILES)
        for file in files:
            if not (folder / file.relative_to(there)).exists():
                _copy(file, there, folder / file.relative_to(there))
        if any(not file.name.endswith(_WITHOUT_VOCABULARY) for file in files):
            return source
    logger.warning("No tokenizer was found to go with the checkpoint: save it there with tokenizer.save_pretrained.")
    return None


def copy_license(sources: Iterable[Source], folder: Path) -> None:
    """Copy the license files of all sources: what is made of several models is under the terms of each.

    A file of a name that is taken by another text is written as base-NAME.
    """
    for source, revision in sources:
        there, files = _files(source, revision, LICENSE_FILES)
        for file in files:
            copied = folder / file.name
            while copied.is_file() and copied.read_bytes() != file.read_bytes():
                copied = copied.with_name(f"base-{copied.name}")
            if not copied.is_file():
                _copy(file, there, copied)


def require_no_links_out(
    folder: str | Path, names: tuple[str, ...] = ("config.json", "generation_config.json")
) -> None:
    """Raise ValueError if a file in a model's folder is a link to elsewhere. Configs keep entries that nobody knows."""
    if Path(folder).is_dir():
        for file in _files(str(folder), None, names)[1]:
            require_no_way_out(file, Path(folder))


def tokenizer_files(source: str | Path, revision: str | None = None) -> list[Path]:
    """Those of a tokenizer in a folder or a repository on the hub; none where there are none, or no such source."""
    return _files(str(source), revision, _TOKENIZER_FILES)[1]


def _files(source: str, revision: str | None, patterns: tuple[str, ...]) -> tuple[Path, list[Path]]:
    """The folder of a source on this machine, and the files there that match."""
    folder = _local(source, revision)
    if not source or not folder.is_dir():  # "" would be the folder that one is in
        return folder, []
    return folder, [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]


def require_no_way_out(file: Path, folder: Path) -> None:
    """Raise ValueError if `file` in a model's `folder` is a link to elsewhere: who made the folder may not read that.

    The hub's cache links to files of its own, which are named by their content.
    """
    target = file.resolve()
    in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if folder.resolve() not in target.parents and not in_cache:
        raise ValueError(
            f"{file} is a link out of its folder, to {target}, which would be copied with the model. Put a copy of the "
            "file in place of the link if it belongs to the model, or remove the link."
        )


def _local(source: str, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        patterns = [*_TOKENIZER_FILES, *LICENSE_FILES]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError):  # no such repository or revision, or no network
        return Path(source)


def _copy(file: Path, folder: Path, to: Path) -> None:
    require_no_way_out(file, folder)
    to.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, to)  # and not its mode: of a source that is read-only, no file could be changed
