"""objective="hidden-distill" in the trainer: what is trained, short to long, errors."""

import pytest
from peft import LoraConfig
from support.training import documents, logged, trainer

from rope_patch.distillation import HiddenTargets
from trl_ext import RopeSFTConfig

HIDDEN = {"objective": "hidden-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}}


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_training_brings_the_student_to_its_teacher(peft, tmp_path):
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if peft else None
    data = documents(2)
    options = {"peft_config": config, "train_dataset": data, "eval_dataset": data, "learning_rate": 3e-3}
    run = trainer(tmp_path, max_steps=40, **HIDDEN, **options)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.7 * before
    assert logged(run, "loss")[0]["loss"] == pytest.approx(before, rel=1e-5), "training and evaluation have one loss"


def test_hidden_states_short_to_long(tmp_path):
    data = documents(2)
    far = {"view": "cream", "view_args": {"target": 200}, "hidden_args": {"short_to_long": 10.0}}
    run = trainer(tmp_path, max_steps=60, train_dataset=data, learning_rate=3e-3, **{**HIDDEN, **far})
    run.train()
    steps = logged(run, "loss", "hidden")
    for entry in steps:
        assert entry["loss"] == pytest.approx(5 * entry["hidden/distance"] + 10 * entry["hidden/far"], rel=1e-3)
    assert sum(e["hidden/far"] for e in steps[-9:]) < 0.7 * sum(e["hidden/far"] for e in steps[:9])


def test_states_that_are_alike_from_the_start_are_no_target():
    for layers in ([0], (0,)):
        with pytest.raises(ValueError, match="layers=.0. are the embeddings"):
            HiddenTargets(layers=layers)
    assert HiddenTargets(layers=[0], short_to_long=1.0).layers == (0,) and HiddenTargets(layers=[0, 1])


def test_a_weight_of_0_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="weight must be a number above 0"):
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **HIDDEN, hidden_args={"weight": 0.0})
