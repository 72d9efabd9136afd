"""One training row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Skill = Literal["chain", "values", "count", "order", "comparison", "passage"]
SKILLS: tuple[Skill, ...] = get_args(Skill)
Kind = Literal["text", "chats", "questions", "own_texts", Skill]
KINDS: tuple[Kind, ...] = get_args(Kind)
ASKING: tuple[Kind, ...] = ("questions", *SKILLS)
"""Kinds of rows that end with questions about their text."""


def shares_with(own_kind: Literal["chats", "own_texts"], skills: tuple[Skill, ...] = SKILLS) -> dict[str, float]:
    """Weights of kinds of rows: a third text, a third the model's own, a third questions, which mostly take a skill.

    Plain questions take the place of a skill that is left out. With a multiple of 288 rows, of which a quarter is made
    as short ones, rows of the other kinds are then the same, token for token.
    """
    asking = 2.0 + len(SKILLS)
    return {"text": asking, own_kind: asking, "questions": asking - len(skills), **dict.fromkeys(skills, 1.0)}


@dataclass(frozen=True)
class Row:
    """Tokens of a row, and the labels among them.

    Args:
        kind: content of the row: running text, chats of the model, hidden facts with questions, texts of the model, or
            questions that take a skill.
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
