"""Option `restore`: relations in some steps, views in the others, each as it is alone."""

import pytest
import torch
from peft import LoraConfig
from support.training import WAYS, documents, logged, trainer

from rope_patch.views import Uniform

EXTEND = {"objective": "self-distill", "view": "skip", "view_args": {"skip": Uniform(1, 40)}}
PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}


def test_each_step_has_the_loss_of_its_own_objective(tmp_path):
    options = {"train_dataset": documents(4), "learning_rate": 0.0, "shuffle_dataset": False, "max_steps": 3, **PI}
    options |= WAYS["checkpointed"]
    both = trainer(tmp_path, **options, **EXTEND, objective_args={"restore": {"every": 2, "v": 0.5}})
    extend = trainer(tmp_path, **options, **EXTEND)
    restore = trainer(tmp_path, **options, objective="relation-distill", objective_args={"v": 0.5})
    results = {}
    for name, run in (("both", both), ("extend", extend), ("restore", restore)):
        run.train()
        results[name] = logged(run, "loss", "grad_norm", "relation", "kl", "ce", "view")
    for step, entry in enumerate(results["both"]):
        alone = results["restore" if step == 1 else "extend"][step]
        assert entry == pytest.approx(alone, rel=1e-4, nan_ok=True), step


@pytest.mark.slow
def test_it_extends_and_restores_at_once(tmp_path):
    """Against the run without it: relations stay nearer to those of the pretrained model."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    data = documents(2)
    options = {"train_dataset": data, "max_steps": 60, "learning_rate": 3e-3, "peft_config": config, **PI}
    relation = {}
    for every in (2, None):
        torch.manual_seed(0)
        args = {"restore": every and {"every": every}}
        run = trainer(tmp_path / str(every), **options, **EXTEND, eval_dataset=data, objective_args=args)
        before = run.evaluate()
        run.train()
        after = run.evaluate()
        assert after["eval_loss"] < before["eval_loss"] and "eval_kl" in after
        judge = trainer(tmp_path, **{**options, "peft_config": None}, objective="relation-distill", model=run.model)
        judge.train_dataset = None
        relation[every] = judge.evaluate(run.eval_dataset)["eval_loss"]
    assert relation[2] < 0.8 * relation[None]


def test_a_copy_serves_both(tmp_path):
    run = trainer(tmp_path, **EXTEND, **PI, objective_args={"teacher": "native", "restore": {"every": 2}})
    objective = run._objective
    assert objective.restore.forward_loss.teacher is objective.extend.forward_loss.teacher is not None


def test_resuming_in_a_step_that_restores(tmp_path):
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, **EXTEND, **PI}
    options["objective_args"] = {"restore": {"every": 2}}
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    whole = trainer(tmp_path, peft_config=config, **options)
    whole.train()
    again = trainer(tmp_path, peft_config=config, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    names = ("loss", "relation", "kl")
    assert logged(again, *names)[1:] == logged(whole, *names)[1:]


def test_without_a_rescaling_there_is_nothing_to_restore(tmp_path):
    with pytest.raises(ValueError, match="restore of objective_args restores a rescaled model"):
        trainer(tmp_path, **EXTEND, objective_args={"restore": {"every": 2}})
