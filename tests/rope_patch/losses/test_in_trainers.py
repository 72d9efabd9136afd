"""SelfDistillSteps: a `Trainer` whose step is that of a plain loop over `self_distillation_loss`."""

import os
import sys
from pathlib import Path

import pytest
import torch
from support.launched import run_ranks
from support.marks import needs_ranks
from support.tiny import tiny, tokens
from support.training import logged
from transformers import TrainingArguments

from rope_patch.losses import ViewConsistency, self_distillation_counts, self_distillation_loss
from rope_patch.losses.in_trainers import SelfDistillSteps
from rope_patch.views import Skip, Uniform

DRAWS = {"view": Skip(skip=Uniform(1, 64)), "seed": 3, "consistency": ViewConsistency(kl_weight=0.5)}
RATE, STEPS = 0.05, 3


class Distilled(SelfDistillSteps):
    draws = DRAWS


def batches(n):
    """Of two rows; the second row of every other batch is padded, so that batches have other numbers of labels."""
    torch.manual_seed(5)
    made = []
    for i in range(n):
        batch = {"input_ids": tokens(2, 24), "attention_mask": torch.ones(2, 24, dtype=torch.long)}
        batch["attention_mask"][1, 9 + i :] = 0
        made.append({**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)})
    return made


def trained(folder, rows_a_batch, micro):
    """The trainer after STEPS steps; each takes `micro` times `rows_a_batch` rows on each rank."""
    data = batches(STEPS * micro)
    rows = [{name: value[i] for name, value in batch.items()} for batch in data for i in range(2)]
    args = TrainingArguments(
        # without clipping, which would hide a loss of another scale
        output_dir=str(folder), per_device_train_batch_size=rows_a_batch, max_steps=STEPS,
        gradient_accumulation_steps=micro, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd",
        logging_steps=1, max_grad_norm=0.0, report_to="none", use_cpu=True, save_strategy="no",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    run = Distilled(tiny(), args, train_dataset=rows)
    run.train()
    return run


@pytest.fixture(scope="module", params=[1, 3], ids=["one micro-batch", "three"])
def both(request, tmp_path_factory):
    """Losses and weights of the trainer, and of the loop."""
    micro, data = request.param, batches(STEPS * request.param)
    run = trained(tmp_path_factory.mktemp("out"), 2, micro)

    model, losses = tiny().train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        now = {**DRAWS, "step": step, "progress": step / (STEPS - 1)}
        parts = data[step * micro : (step + 1) * micro]
        counts = sum(self_distillation_counts(model, part, **now) for part in parts)
        total = sum(self_distillation_loss(model, part, **now, counts=counts) for part in parts)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return run, losses, model


def test_losses_and_weights_are_those_of_a_loop(both):
    run, losses, model = both
    assert [entry["loss"] for entry in logged(run, "loss")] == pytest.approx(losses, rel=1e-5)
    for trained, right in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, right, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_evaluation_has_the_loss_of_the_trainer_at_true_positions(both):
    run, (batch,) = both[0], batches(1)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(2)]
    right = run.model.eval()(**batch).loss.item()
    assert run.evaluate(rows)["eval_loss"] == pytest.approx(right, rel=1e-5)


@needs_ranks
@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path):
    script = "import sys, torch; from test_in_trainers import trained; run = trained(sys.argv[1], 1, 1)\n"
    script += "run.args.process_index or torch.save(run.model.state_dict(), sys.argv[1] + '/weights')"
    (tmp_path / "rank.py").write_text(script)
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(map(str, (root, root / "kernels", root / "tests", Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", str(tmp_path / "rank.py"), str(tmp_path)]
    done = run_ranks([sys.executable, *launch], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    weights, right = torch.load(tmp_path / "weights"), trained(tmp_path, 2, 1).model.state_dict()
    for name, value in right.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
