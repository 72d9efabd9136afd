"""What was won and what was lost, in sentences that say no more than the figures do."""

import math

import pytest
from support.grids import WINDOW, grid, losses

from rope_patch.eval import ShortText, regressions, verdict
from rope_patch.eval.verdict import figure_rows


def said_of(measure, before, after):
    return verdict(regressions({measure: {"before": before, "after": after}}, window=WINDOW))


def test_answers_are_won_and_lost_in_percent():
    said = said_of("passkey", grid([[1.0] * 10, [0.0] * 10]), grid([[0.0] * 10, [1.0] * 10]))
    assert said[0] == "Won:  passkeys in 4,000 tokens: 100 % are found, before 0 %."
    assert said[1] == "Lost: passkeys in 1,000 tokens: 0 % are found, before 100 %."
    # six of ten have to differ
    assert said[-1].startswith("With 10 prompts a length, changes of less than about 60 percentage points may")
    half = said_of("passkey", grid([[0.0] * 10, [0.0] * 10]), grid([[0.0] * 10, [1.0] * 5 + [0.0] * 5]))
    assert half[:3] == [
        "Won:  nothing beyond chance.",
        "Lost: nothing beyond chance.",
        "All other differences may be chance.",
    ]


@pytest.mark.parametrize(("n", "nothing"), [(1, "that can be judged"), (3, "beyond chance")])
def test_few_answers_count_neither_way(n, nothing):
    said = said_of("passkey", grid([[0.0] * n]), grid([[1.0] * n]))
    assert said[:2] == [f"Won:  nothing {nothing}.", f"Lost: nothing {nothing}."]
    assert said[-1].startswith(f"Prompts of each length: {n}. Changes of answers are judged from 6 prompts on.")


def test_losses_are_said_as_the_probability_of_the_right_token():
    said = said_of("cliff", losses(-math.log(0.01)), losses(-math.log(0.25)))
    for line, span in zip(said, ("2,048 to 2,559", "2,560 to 4,095"), strict=False):
        assert line == f"Won:  text at positions {span}: the right next token gets 25.0 %, before 1.0 %."
    assert said[2] == "Lost: nothing beyond chance." and "exp(-loss)" in said[4]
    assert "those of a single row, and other texts may differ" in said[5] and len(said) == 6


def test_a_small_gain_is_said_in_digits_that_show_it():
    said = said_of("cliff", losses(3.4), losses(3.397))  # 3.337 and 3.347 percent
    assert said[0].endswith("the right next token gets 3.35 %, before 3.34 %.")
    before, after = ([1.0] * right + [0.0] * (1000 - right) for right in (986, 994))
    said = said_of("short", *(ShortText({}, {}, {}, {"piqa": scores}) for scores in (before, after)))
    assert said[0] == "Won:  piqa: the score is 99.4 %, before 98.6 %."


def test_a_loss_that_is_no_number_is_lost():
    said = said_of("cliff", losses(4.0), losses(math.nan))
    assert said[0] == "Won:  nothing beyond chance."
    assert said[1].startswith("Lost: text at positions 2,048 to 2,559: the right next token gets no number (a")


def test_other_scores_go_by_their_names_and_other_models_by_their_labels():
    scores = {"native": [1.0] * 20, "a": [1.0, 0.0] * 10, "b": [1.0] * 20}
    results = {k: ShortText({"piqa": sum(s) / 20}, {}, {"piqa": 20}, {"piqa": s}) for k, s in scores.items()}
    assert verdict(regressions({"short": results}))[:4] == [
        "a won: nothing beyond chance.",
        "a lost: piqa: the score is 50 %, native 100 %.",
        "b won: nothing beyond chance.",
        "b lost: nothing beyond chance.",
    ]


def test_a_long_list_is_cut_and_counted():
    lengths = [1000 * k for k in range(1, 13)]
    said = said_of("passkey", grid([[0.0] * 10] * 12, lengths=lengths), grid([[1.0] * 10] * 12, lengths=lengths))
    assert said[8:10] == ["Won:  and 4 more.", "Lost: nothing beyond chance."]


def test_one_model_alone_has_nothing_to_win():
    assert verdict(regressions({"passkey": {"a": grid([[1.0] * 10] * 2)}})) == [
        "Only a was measured, so there is nothing to compare it with."
    ]


def test_the_table_has_a_row_for_each_figure():
    rows = figure_rows({"passkey": {"a": grid([[1.0], [0.0]])}, "cliff": {"b": losses(2.0)}}, WINDOW)
    assert rows == {
        "passkeys found at 1,000 tokens": {"a": "100 %"},
        "passkeys found at 4,000 tokens": {"a": "0 %"},
        "loss to position 2,048, in nats": {"b": "2.000"},
        "loss from there to 4,096": {"b": "2.000"},
    }
    within = figure_rows({"cliff": {"b": losses(2.0).over_window(8192)}}, 8192)
    assert within == {"loss to position 4,096, in nats": {"b": "2.000"}}, "rows that end within the window"
