"""Questions of people about a paragraph, answered as a chat: those of SQuAD, which no rows of training are like."""

from pathlib import Path
from statistics import fmean
from typing import Any

from rope_patch.eval.measures.squad import Paragraph, read_squad
from rope_patch.generation.generation import greedy_answers
from rope_patch.prompts.asking import Frame

NEW_TOKENS = 48  # of an answer, at most


def read_paragraphs(file: Path) -> list[Paragraph]:
    """Paragraphs of a file of SQuAD's form that have a question with an answer.

    Raises:
        ValueError: there is none.
    """
    found = [paragraph for paragraph in read_squad(file) if paragraph.questions]
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
    """Of each paragraph the share of its questions that are answered, as written, in the words of SQuAD's first."""
    prompts = [prompts_about(paragraph, tokenizer) for paragraph in paragraphs]
    replies = iter(greedy_answers(model, tokenizer, sum(prompts, []), max_new_tokens=NEW_TOKENS))
    said = [[(answers[0], next(replies)) for _, answers in paragraph.questions] for paragraph in paragraphs]
    return {
        "scores": [fmean(answer in reply for answer, reply in of_one) for of_one in said],
        "questions": sum(map(len, said)),
        "shown": said[0],
    }
