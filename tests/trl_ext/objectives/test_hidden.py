"""objective="hidden-distill" in the trainer: normalisation, short to long, what is trained, errors."""

import pytest
from support.training import WAYS, documents, logged, trainer

from rope_patch.losses import HiddenTargets

HIDDEN = {"objective": "hidden-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}}


def test_training_brings_the_student_to_its_teacher(tmp_path):
    data = documents(2)
    run = trainer(tmp_path, max_steps=12, train_dataset=data, eval_dataset=data, **HIDDEN)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.7 * before
    assert logged(run, "loss")[0]["loss"] == pytest.approx(before, rel=1e-5), "training and evaluation have one loss"


def test_a_step_is_the_mean_over_its_tokens_however_it_is_batched(tmp_path):
    options = {"view": "cream", "view_args": {"target": 200}, "objective_args": {"short_to_long": 10.0}, **HIDDEN}
    options |= {"train_dataset": documents(4), "max_steps": 1, "train_sampling_strategy": "sequential"}
    steps = []
    for way in ("padded", "accumulated", "checkpointed"):
        run = trainer(tmp_path, **options, **WAYS[way])
        run.train()
        steps += logged(run, "loss", "grad_norm", "hidden", "num_tokens")
    for step in steps:
        assert step == pytest.approx(steps[0], rel=1e-4)
        assert step["loss"] == pytest.approx(5 * step["hidden/distance"] + 10 * step["hidden/far"], rel=1e-4)


def test_states_that_are_alike_from_the_start_are_no_target():
    for layers in ([0], (0,)):
        with pytest.raises(ValueError, match="layers=.0. are the embeddings"):
            HiddenTargets(layers=layers)
    assert HiddenTargets(layers=[0], short_to_long=1.0).layers == (0,) and HiddenTargets(layers=[0, 1])
