"""Writing the card into a folder, without replacing one that a user wrote or edited."""

import hashlib
import re
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

CARD_NAME = "README.md"
OTHER_CARD_NAME = "README.rope-patch.md"
_MARK = re.compile(r"\n<!-- Written by rope-patch \((\w+)\)[^\n]*-->\n")


def has_card_of_user(folder: Path) -> bool:
    """Whether README.md in `folder` was not written by this package, or was changed since."""
    page = folder / CARD_NAME
    if not page.is_file():
        return False
    text = page.read_text(encoding="utf-8")
    mark = _MARK.search(text)
    return mark is None or mark.group(1) != _digest(_MARK.sub("", text, count=1))


def write_card(folder: Path, text: str, *, keep: bool) -> Path:
    """Write a card, and return the file.

    Args:
        folder: of the checkpoint.
        text: of the card.
        keep: whether README.md is the user's, from `has_card_of_user` before anything is saved into the folder. The
            card then gets another name, and a warning says so.
    """
    page = folder / (OTHER_CARD_NAME if keep else CARD_NAME)
    if keep:
        logger.warning(
            f"{folder / CARD_NAME} was not written by rope-patch, or was changed since. It is kept, and the card of "
            f"this model is in {OTHER_CARD_NAME} beside it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    note = "saving the model writes it again, unless it was changed."
    page.write_text(f"{text}\n<!-- Written by rope-patch ({_digest(text)}): {note} -->\n", encoding="utf-8")
    return page


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
