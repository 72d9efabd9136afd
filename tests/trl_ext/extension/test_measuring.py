"""What is said of figures before and after, in words."""

import math

import pytest
import torch

from rope_patch.eval import LossByPosition
from rope_patch.eval.measures.retrieval_grid import RetrievalGrid
from trl_ext.extension.measuring import AFTER, BEFORE, answers, verdict

WINDOW = 2048


def grid(scores, reply="The pass key is 7.", lengths=(1000, 4000)):
    """One depth; `scores` of each length."""
    n = len(scores[0])
    return RetrievalGrid(
        kind="passkey",
        lengths=list(lengths),
        depths=[0.5],
        accuracy=[[sum(of) / n] for of in scores],
        trials=n,
        places=[0.5] * n * len(scores),
        scores=[score for of in scores for score in of],
        replies=[
            {"length": length, "question": "\nWhat is the pass key? It is", "expected": "7", "reply": reply, "score": 1}
            for length in lengths
        ],
    )


def results(before, after, reply_before="I", reply_after="7"):
    return {"passkey": {BEFORE: grid(before, reply_before), AFTER: grid(after, reply_after)}}


def losses(beyond):
    loss = torch.cat([torch.full((WINDOW,), 2.0), torch.full((WINDOW,), beyond)]).double()
    return LossByPosition(loss, 1, WINDOW, (tuple(loss.unflatten(0, (-1, 64)).mean(-1).tolist()),), "a row")


def test_answers_are_won_and_lost_in_percent():
    said = verdict(results([[1.0] * 10, [0.0] * 10], [[0.0] * 10, [1.0] * 10]), WINDOW)
    assert said[0] == "Won:  passkeys in 4,000 tokens: 100 % are found, before 0 %."
    assert said[1] == "Lost: passkeys in 1,000 tokens: 0 % are found, before 100 %."
    # six of ten have to differ
    assert said[2].startswith("With 10 prompts a length, changes of less than about 60 percentage points may")
    half = results([[0.0] * 10, [0.0] * 10], [[0.0] * 10, [1.0] * 5 + [0.0] * 5])
    assert verdict(half, WINDOW)[0] == "Won:  nothing beyond chance."


def test_few_answers_count_neither_way():
    said = verdict(results([[0.0]], [[1.0]]), WINDOW)
    assert said == [
        "Won:  nothing beyond chance.",
        "Lost: nothing beyond chance.",
        "Prompts of each length: 1. Changes of answers are judged from 6 prompts on; --prompts sets the number.",
    ]


def test_losses_are_said_as_the_probability_of_the_right_token():
    before, after = losses(-math.log(0.01)), losses(-math.log(0.25))
    said = verdict({"cliff": {BEFORE: before, AFTER: after}}, WINDOW)
    assert said[0] == "Won:  text at positions 2,048 to 4,095: the right next token gets 25.0 %, before 1.0 %."
    assert said[1] == "Lost: nothing beyond chance." and "exp(-loss)" in said[2]
    assert "those of a single row, and other texts may differ" in said[3] and len(said) == 4


def test_a_small_gain_is_said_in_digits_that_show_it():
    before, after = losses(3.4), losses(3.397)  # 3.337 and 3.347 percent
    said = verdict({"cliff": {BEFORE: before, AFTER: after}}, WINDOW)
    assert said[0].endswith("the right next token gets 3.35 %, before 3.34 %.")


def test_a_loss_that_is_no_number_is_lost():
    said = verdict({"cliff": {BEFORE: losses(4.0), AFTER: losses(math.nan)}}, WINDOW)
    assert said[0] == "Won:  nothing beyond chance."
    assert said[1].startswith("Lost: text at positions 2,048 to 4,095: the right next token gets no number (a")


def test_a_question_of_the_longest_prompt_is_shown_with_both_answers():
    shown = answers(results([[1.0], [0.0]], [[1.0], [1.0]], " \n", "7. " * 50))
    assert "in 4,000 tokens. The number is 7." in shown[0] and shown[1] == "  question: What is the pass key? It is"
    assert shown[2] == "  before:   (nothing)" and shown[3][:17] == "  after:    7. 7." and shown[3].endswith(" ...")


@pytest.mark.parametrize("found", [{}, {"cliff": {BEFORE: losses(2.0), AFTER: losses(2.0)}}])
def test_without_questions_there_is_none(found):
    assert answers(found) == []
