"""The tokens that a tokenizer puts around a text, and rows of a long text that each have them where they belong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PROBE = "a"


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer puts around a text by itself.

    Args:
        begin: token ids before the text, e.g. the beginning-of-sequence token; () if it puts none.
        end: token ids behind it, e.g. the end-of-sequence token; () if it puts none.
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> "SpecialTokens":
        """Those of a tokenizer of Transformers, read off a short text with and without them.

        Raises:
            ValueError: the tokenizer changes the text's own tokens when it adds its special ones.
        """
        framed = list(tokenizer(_PROBE)["input_ids"])
        plain = list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
        for first in range(len(framed) - len(plain) + 1):
            if framed[first : first + len(plain)] == plain:
                return cls(tuple(framed[:first]), tuple(framed[first + len(plain) :]))
        raise ValueError(
            f"{type(tokenizer).__name__} gives {framed} for {_PROBE!r} with its special tokens and {plain} without "
            "them, so that what it adds cannot be told from the text. Give rows as input_ids."
        )


def cut_document(
    ids: Sequence[int], seq_len: int, special: SpecialTokens, *, keep_rest: bool = True
) -> list[list[int]]:
    """Rows of at most `seq_len` tokens that together hold all of a document, in order, without overlap.

    Each row begins as the tokenizer begins a text: a model whose tokenizer adds a beginning-of-sequence token has seen
    it in front of everything it was trained on. Only the row with the document's last token ends as a text does.

    Args:
        ids: the document's tokens without special ones.
        seq_len: tokens of a row, its special ones included.
        special: of the tokenizer.
        keep_rest: whether a last row of fewer than `seq_len` tokens is kept.

    Returns:
        The rows; none for a document without tokens.

    Raises:
        ValueError: `seq_len` leaves no room for a token of the document.
    """
    room = seq_len - len(special.begin)
    if room < 1:
        raise ValueError(
            f"seq_len must leave room beside the {len(special.begin)} tokens that the tokenizer puts before a text, "
            f"got {seq_len}."
        )
    body = [*ids, *special.end] if ids else []
    rows = [[*special.begin, *body[first : first + room]] for first in range(0, len(body), room)]
    return rows if keep_rest else [row for row in rows if len(row) == seq_len]
