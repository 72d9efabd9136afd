"""Questions about paragraphs, from SQuAD's own file or from JSON lines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...prompts.text import is_json_lines, read_json, read_json_lines


@dataclass(frozen=True)
class Paragraph:
    """A text and the questions about it.

    Args:
        title: of the article that it is from.
        text: its own.
        questions: each with the words of the text that answer it, of which there are several where writers differ.
    """

    title: str
    text: str
    questions: list[tuple[str, list[str]]]


def read_squad(file: Path) -> list[Paragraph]:
    """The paragraphs of SQuAD's own JSON file, or of .jsonl(.xz, .gz) with `title`, `context` and `qas`.

    Questions without an answer, as SQuAD 2.0 has them, are left out.

    Raises:
        ValueError: the file is of another form.
    """
    with of_form(file, _FORM):
        if is_json_lines(file):
            paragraphs: list[Any] = list(read_json_lines(file))
        else:
            data = read_json(file.read_text(encoding="utf-8"))["data"]
            paragraphs = [{**p, "title": d["title"]} for d in data for p in d["paragraphs"]]
        return [Paragraph(p["title"], p["context"], _answered(p["qas"])) for p in paragraphs]


_FORM = (
    'SQuAD\'s own JSON file, {"data": [{"title", "paragraphs": [{"context", "qas": [{"question", "answers"}]}]}]}, or '
    "JSON lines with title, context and qas"
)


@contextmanager
def of_form(file: Path, form: str) -> Iterator[None]:
    """What reading a `file` of another `form` raises becomes a ValueError that names both."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} cannot be read: {reason}. It must be {form}.") from error


def _answered(qas: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    with_texts = ((qa["question"], [a["text"] if isinstance(a, dict) else a for a in qa["answers"]]) for qa in qas)
    return [(question, answers) for question, answers in with_texts if answers]
