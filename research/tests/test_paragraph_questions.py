"""Questions about paragraphs: what a model reads, and what counts as right."""

import json

import pytest
from support.characters import chat_tokenizer

import paragraph_questions
from paragraph_questions import Paragraph

FOX = Paragraph("Foxes", "A fox ran.", [("who ran?", ["fox", "another"]), ("what did it?", ["ran", "another"])])
OWL = Paragraph("Owls", "An owl sat.", [("who sat?", ["owl"])])


def write(file, *lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_paragraphs_are_read_that_have_a_question_with_an_answer(tmp_path):
    asked = [{"question": q, "answers": answers} for q, answers in FOX.questions]
    unanswered = {"question": "why?", "answers": []}
    foxes = {"title": "Foxes", "context": FOX.text, "qas": [*asked, unanswered]}
    lines = foxes, {"title": "None", "context": "No more.", "qas": [unanswered]}
    assert paragraph_questions.read_paragraphs(write(tmp_path / "squad.jsonl", *lines)) == [FOX]
    with pytest.raises(ValueError, match="no paragraph with an answered question"):
        paragraph_questions.read_paragraphs(write(tmp_path / "none.jsonl", lines[1]))


@pytest.mark.parametrize("chat", [True, False])
def test_each_question_stands_behind_its_paragraph(chat):
    tokenizer = chat_tokenizer()
    if chat:
        message = [{"role": "user", "content": "A fox ran.\n\nwho ran?"}]
        expected = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    else:
        tokenizer.chat_template = None
        expected = "A fox ran.\n\nwho ran?\nAnswer:"
    first, second = paragraph_questions.prompts_about(FOX, tokenizer)
    assert first == tokenizer(expected)["input_ids"] and second != first


def test_a_paragraph_counts_by_the_share_of_its_answers_that_are_right(monkeypatch):
    said = ["It was the fox.", "I do not know.", "An owl"]

    def answers(model, tokenizer, prompts, max_new_tokens):
        assert len(prompts) == 3 and max_new_tokens == paragraph_questions.NEW_TOKENS
        return said

    monkeypatch.setattr(paragraph_questions, "greedy_answers", answers)
    found = paragraph_questions.answers_about(None, chat_tokenizer(), [FOX, OWL])
    assert found["scores"] == [0.5, 1.0] and found["questions"] == 3
    assert found["shown"] == [("fox", said[0]), ("ran", said[1])]
