"""Special tokens that a tokenizer adds to a text, and rows of a long text with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PROBE = "a"


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that a tokenizer adds to a text.

    Args:
        begin: token IDs before the text, e.g. the beginning-of-sequence token.
        end: token IDs after the text, e.g. the end-of-sequence token.
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> "SpecialTokens":
        """The special tokens of a Transformers tokenizer, from a short text with and without them.

        Raises:
            ValueError: the tokenizer changes the tokens of the text when it adds special ones.
        """
        framed = list(tokenizer(_PROBE)["input_ids"])
        plain = list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
        for first in range(len(framed) - len(plain) + 1):
            if framed[first : first + len(plain)] == plain:
                return cls(tuple(framed[:first]), tuple(framed[first + len(plain) :]))
        raise ValueError(
            f"{type(tokenizer).__name__} gives {framed} for {_PROBE!r} with its special tokens and {plain} without "
            "them, so the special tokens cannot be separated from the text. Give rows as input_ids."
        )


def cut_document(
    ids: Sequence[int], seq_len: int, special: SpecialTokens, *, keep_rest: bool = True
) -> list[list[int]]:
    """Split a document into rows of at most `seq_len` tokens, in order, without overlap.

    Each row begins with the special tokens `begin`, because the model has seen them before every text of its training.
    Only the row with the document's last token has `end`.

    Args:
        ids: the document's tokens without special ones.
        seq_len: tokens of a row, with its special tokens.
        special: of the tokenizer.
        keep_rest: whether to keep a last row of fewer than `seq_len` tokens.

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
