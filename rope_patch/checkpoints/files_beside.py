"""Copying the files that belong to a model's weights: its tokenizer and its license."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

Source = tuple[str, str | None]
"""(folder or hub ID, "" for none; revision on the hub, None for the newest)."""

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", "chat_template*", "additional_chat_templates/*.jinja", "*processor_config.json",
)  # fmt: skip
# ends of names of tokenizer files without a vocabulary
_WITHOUT_VOCABULARY = (
    "_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", ".jinja",
)  # fmt: skip
# in capitals or not; patterns of the hub are case-sensitive
LICENSE_FILES = tuple(
    "".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in name) + "*"
    for name in ("license", "licence", "notice", "copying", "use_policy")
)


def copy_tokenizer(sources: Iterable[Source], folder: Path) -> Source | None:
    """Copy a tokenizer's files, each from the first source that has it, and return the source of its vocabulary.

    An adapter's folder may have a chat template and no vocabulary, which then comes from the next source.
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
    """Copy the license files of all sources, because a model is under the terms of all models that it was made of.

    If another text has the name of a file, it is written as base-NAME.
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
    """Raise ValueError if one of these files is a link out of `folder`: a copied config keeps unknown entries."""
    if Path(folder).is_dir():
        for file in _files(str(folder), None, names)[1]:
            require_no_way_out(file, Path(folder))


def tokenizer_files(source: str | Path, revision: str | None = None) -> list[Path]:
    """The tokenizer files in a folder or a repository on the hub; [] if it has none, or does not exist."""
    return _files(str(source), revision, _TOKENIZER_FILES)[1]


def _files(source: str, revision: str | None, patterns: tuple[str, ...]) -> tuple[Path, list[Path]]:
    """The folder of a source on this machine, and its files that match."""
    folder = Path(source)
    if not source:  # "" would be the working directory
        return folder, []
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(source, revision=revision, allow_patterns=[*_TOKENIZER_FILES, *LICENSE_FILES])
            )
        except (OSError, ValueError):  # no such repository or revision, or no network
            return folder, []
    return folder, [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]


def require_no_way_out(file: Path, folder: Path) -> None:
    """Raise ValueError if `file` is a link out of a model's `folder`, whose author may not read what it links to.

    Links of the hub's cache to its own files pass.
    """
    target = file.resolve()
    in_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if folder.resolve() not in target.parents and not in_cache:
        raise ValueError(
            f"{file} is a link out of its folder, to {target}, which would be copied with the model. Put a copy of the "
            "file in place of the link if it belongs to the model, or remove the link."
        )


def _copy(file: Path, folder: Path, to: Path) -> None:
    require_no_way_out(file, folder)
    to.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, to)  # not its mode: files of a read-only source could not be changed
