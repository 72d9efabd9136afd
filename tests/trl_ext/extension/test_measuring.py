"""What is printed of figures before and after."""

import sys
from types import SimpleNamespace

import pytest
from support.grids import WINDOW, grid, losses

from trl_ext.extension.measuring import AFTER, BEFORE, answers, log_verdict, table


def results(before, after, reply_before="I", reply_after="7"):
    return {"passkey": {BEFORE: grid(before, reply_before), AFTER: grid(after, reply_after)}}


def test_figures_stand_in_a_column_before_and_one_after():
    lines = table(results([[1.0], [0.0]], [[1.0], [1.0]]), WINDOW)
    assert [line.split("  ")[0] for line in lines[1:]] == [f"passkeys found at {n} tokens" for n in ("1,000", "4,000")]
    assert lines[0].split() == ["before", "after"] and lines[2].endswith("  0 %      100 %")


def test_a_question_of_the_longest_prompt_is_shown_with_both_answers():
    shown = answers(results([[1.0], [0.0]], [[1.0], [1.0]], " \n", "7. " * 50))
    assert "in 4,000 tokens of text. The number is 7." in shown[0]
    assert shown[1] == "  question:  What is the pass key? It is"
    assert shown[2] == "  before:    (nothing)" and shown[3][:18] == "  after:     7. 7." and shown[3].endswith(" ...")


def test_the_question_that_is_shown_is_one_that_tells_the_models_apart():
    found = results([[1.0], [0.0]], [[1.0], [1.0]], "I", "7")
    for label, score in ((BEFORE, 0), (AFTER, 1)):
        replies = found["passkey"][label].replies
        nobody = {**replies[-1], "score": 0}
        replies[-1:] = [nobody, {**nobody, "expected": "8", "score": score}]
    assert "The number is 8." in answers(found)[0]


@pytest.mark.parametrize("found", [{}, {"cliff": {BEFORE: losses(2.0), AFTER: losses(2.0)}}])
def test_without_questions_there_is_none(found):
    assert answers(found) == []


def test_the_verdict_is_a_table_of_wandb(tmp_path, monkeypatch):
    logged = []
    run = SimpleNamespace(log=logged.append)
    wandb = SimpleNamespace(run=run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log_verdict(["Won: one.", "Lost: two."], ["wandb"], tmp_path)
    wandb.run, wandb.init = None, lambda **settings: run
    log_verdict(["Won: one."], ["wandb"], tmp_path)
    one, two = ["Won: one."], ["Lost: two."]
    assert logged == [{"verdict": (["verdict"], [one, two])}, {"verdict": (["verdict"], [one])}]


def test_the_verdict_is_a_table_of_trackio(tmp_path, monkeypatch):
    calls = []
    trackio = SimpleNamespace(
        init=lambda **settings: calls.append(settings),
        log=calls.append,
        finish=lambda: calls.append("finished"),
        Table=lambda columns, data: (columns, data),
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    log_verdict(["Won: one.", "Lost: two."], ["trackio"], tmp_path)
    shown = {"verdict": (["verdict"], [["Won: one."], ["Lost: two."]])}
    assert calls == [{"project": "huggingface", "name": "verdict"}, shown, "finished"]


def test_the_verdict_is_a_text_of_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_verdict(["Won: one.", "Lost: two."], ["tensorboard"], tmp_path)
    found = events.EventAccumulator(str(tmp_path / "runs/verdict"))
    found.Reload()
    (entry,) = found.Tensors("verdict/text_summary")
    assert entry.tensor_proto.string_val == [b"Won: one.\n\nLost: two."]
