"""Questions of people about a paragraph, answered as a chat: those of SQuAD, which no rows of training are like."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rope_patch.eval.asking import Frame
from rope_patch.eval.generation import greedy_answers
from rope_patch.eval.text import read_json_lines

NEW_TOKENS = 48  # of an answer, at most


@dataclass(frozen=True)
class Paragraph:
    """A text and questions about it, each with the words of the text that answer it."""

    text: str
    questions: list[tuple[str, str]]


def read_paragraphs(file: Path) -> list[Paragraph]:
    """Paragraphs of JSON lines with `context` and `qas` [question, answers], of each question its first answer.

    Raises:
        ValueError: there is none with a question that has an answer.
    """
    found = []
    for line in read_json_lines(file):
        fields: dict[str, Any] = dict(line)
        questions = [(qa["question"], qa["answers"][0]) for qa in fields["qas"] if qa["answers"]]
        if questions:
            found.append(Paragraph(fields["context"], questions))
    if not found:
        raise ValueError(f"{file} has no paragraph with an answered question: give one of SQuAD's form.")
    return found


def prompts_about(paragraph: Paragraph, tokenizer: Any) -> list[list[int]]:
    """Each question behind the paragraph, through the chat template, or of base models with "Answer:" behind it."""
    frame = Frame.of(tokenizer, bool(tokenizer.chat_template))
    turn = frame.turn or "\nAnswer:"

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [[*frame.begin, *ids(f"{paragraph.text}\n\n{question}{turn}")] for question, _ in paragraph.questions]


def answers_about(model: Any, tokenizer: Any, paragraphs: list[Paragraph]) -> dict[str, Any]:
    """Of each paragraph the share of its questions whose answer, as written, has SQuAD's words in it."""
    prompts = [prompts_about(paragraph, tokenizer) for paragraph in paragraphs]
    replies = iter(greedy_answers(model, tokenizer, sum(prompts, []), max_new_tokens=NEW_TOKENS))
    said = [[(answer, next(replies)) for _, answer in paragraph.questions] for paragraph in paragraphs]
    return {
        "scores": [fmean(answer in reply for answer, reply in of_one) for of_one in said],
        "questions": sum(map(len, said)),
        "shown": said[0],
    }
