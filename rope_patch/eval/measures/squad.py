"""Questions about paragraphs, from SQuAD's JSON file or from JSON lines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...prompts.text import is_json_lines, read_json, read_json_lines

_FORM = (
    'SQuAD\'s own JSON file, {"data": [{"title", "paragraphs": [{"context", "qas": [{"question", "answers"}]}]}]}, or '
    "JSON lines with title, context and qas"
)


@dataclass(frozen=True)
class Paragraph:
    """A text and the questions about it.

    Args:
        title: title of its article.
        text: the text.
        questions: (question, answers); the answers are words of the text, one for each annotator.
    """

    title: str
    text: str
    questions: list[tuple[str, list[str]]]


def read_squad(file: Path) -> list[Paragraph]:
    """The paragraphs of SQuAD's JSON file, or of .jsonl(.xz, .gz) with `title`, `context` and `qas`.

    Questions without an answer, as in SQuAD 2.0, are left out.
    """
    with readable(file, _FORM):
        if is_json_lines(file):
            paragraphs: list[Any] = list(read_json_lines(file))
        else:
            data = read_json(file.read_text(encoding="utf-8"))["data"]
            paragraphs = [{**p, "title": d["title"]} for d in data for p in d["paragraphs"]]
        return [
            Paragraph(
                p["title"],
                p["context"],
                [
                    (qa["question"], [a["text"] if isinstance(a, dict) else a for a in qa["answers"]])
                    for qa in p["qas"]
                    if qa["answers"]
                ],
            )
            for p in paragraphs
        ]


@contextmanager
def readable(file: Path, form: str) -> Iterator[None]:
    """Turn errors of reading `file` into a ValueError that says which `form` it must have."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} cannot be read: {reason}. It must be {form}.") from error
