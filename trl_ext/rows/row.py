"""One training row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["text", "chats", "questions", "own_texts"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Row:
    """Tokens of a row, and the labels among them.

    Args:
        kind: content of the row: running text, chats of the model, hidden facts with questions, or texts of the model.
        ids: token ids.
        labelled: 1 for each token that is a label, else 0; as many as `ids`.
    """

    kind: Kind
    ids: list[int]
    labelled: list[int]

    @classmethod
    def with_one_label(cls, kind: Kind, ids: Sequence[int], label: bool) -> "Row":
        """A row in which all tokens are labels, or none."""
        return cls(kind, list(ids), [int(label)] * len(ids))
