"""Gradients and weights that are no numbers: training stops, and what was good stays."""

import pytest
import torch
from support.training import logged, trainer
from trl import SFTConfig, SFTTrainer

from rope_patch.checkpoints.checked_loading import load_checkpoint
from trl_ext import RopeSFTConfig, RopeSFTTrainer

SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


def spoilt(run, step, value):
    """`run`, of whose first weight the gradient of an optimizer step is `value`."""
    weight = next(p for p in run.model.parameters() if p.requires_grad)
    weight.register_hook(lambda gradient: gradient * value if run.state.global_step == step else gradient)
    return run


@pytest.mark.parametrize(
    ("value", "max_grad_norm", "n_steps"), [("nan", 0.0, 3), ("inf", 1.0, 2)], ids=["middle", "last"]
)
def test_a_gradient_that_is_not_finite_stops_a_run_before_the_step(value, max_grad_norm, n_steps, tmp_path):
    run = spoilt(trainer(tmp_path, max_grad_norm=max_grad_norm, max_steps=n_steps, **SAVES), 1, float(value))
    with pytest.raises(FloatingPointError, match="norm of the gradients became (nan|inf) at optimizer step 1"):
        run.train()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    kept = load_checkpoint(tmp_path / "checkpoint-1")
    for weight, saved in zip(run.model.parameters(), kept.parameters(), strict=True):
        assert weight.isfinite().all() and torch.equal(weight, saved)


def test_a_gradient_that_loss_scaling_leaves_out_is_left_out_as_with_trl(tmp_path):
    runs = []
    for kind in ((SFTTrainer, SFTConfig), (RopeSFTTrainer, RopeSFTConfig)):
        torch.manual_seed(0)
        run = spoilt(trainer(tmp_path, *kind, max_steps=2), 0, float("inf"))
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        run.train()
        runs.append((logged(run, "loss"), [weight.clone() for weight in run.model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(weight.isfinite().all() for weight in runs[1][1])
    assert all(torch.equal(stock, ours) for stock, ours in zip(runs[0][1], runs[1][1], strict=True))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    run = trainer(tmp_path, max_steps=1, learning_rate=1e38, **SAVES)
    with pytest.raises(FloatingPointError, match="trained weights hold numbers that are not finite, .* are not saved"):
        run.train()
    assert not list(tmp_path.glob("checkpoint-*"))
