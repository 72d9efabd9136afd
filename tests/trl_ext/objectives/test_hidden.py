"""objective="hidden-distill" in the trainer: what is trained, short to long, errors."""

import pytest
from support.training import documents, logged, trainer

from rope_patch.losses import HiddenTargets

HIDDEN = {"objective": "hidden-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}}


def test_training_brings_the_student_to_its_teacher(tmp_path):
    data = documents(2)
    run = trainer(tmp_path, max_steps=12, train_dataset=data, eval_dataset=data, **HIDDEN)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.7 * before
    assert logged(run, "loss")[0]["loss"] == pytest.approx(before, rel=1e-5), "training and evaluation have one loss"


def test_hidden_states_short_to_long(tmp_path):
    far = {"view": "cream", "view_args": {"target": 200}, "objective_args": {"short_to_long": 10.0}}
    run = trainer(tmp_path, max_steps=16, train_dataset=documents(2), **{**HIDDEN, **far})
    run.train()
    steps = logged(run, "loss", "hidden")
    for entry in steps:
        assert entry["loss"] == pytest.approx(5 * entry["hidden/distance"] + 10 * entry["hidden/far"], rel=1e-3)
    assert sum(e["hidden/far"] for e in steps[-4:]) < 0.7 * sum(e["hidden/far"] for e in steps[:4])


def test_states_that_are_alike_from_the_start_are_no_target():
    for layers in ([0], (0,)):
        with pytest.raises(ValueError, match="layers=.0. are the embeddings"):
            HiddenTargets(layers=layers)
    assert HiddenTargets(layers=[0], short_to_long=1.0).layers == (0,) and HiddenTargets(layers=[0, 1])
