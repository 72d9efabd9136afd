"""SelfDistillSteps: a `Trainer` whose step is that of a plain loop over `self_distillation_loss`."""

import pytest
import torch
from support.tiny import tiny, tokens
from support.training import logged
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer, TrainingArguments

from rope_patch.losses import ViewConsistency, self_distillation_counts, self_distillation_loss
from rope_patch.losses.in_trainers import SelfDistillSteps
from rope_patch.views import Skip, Uniform

DRAWS = {"view": Skip(skip=Uniform(1, 64)), "seed": 3, "consistency": ViewConsistency(kl_weight=0.5)}
RATE, STEPS = 0.05, 3


class Distilled(SelfDistillSteps, Trainer):
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


@pytest.fixture(scope="module", params=[1, 3], ids=["one micro-batch", "three"])
def both(request, tmp_path_factory):
    """Losses and weights of the trainer, and of the loop."""
    micro, data = request.param, batches(STEPS * request.param)
    rows = [{name: value[i] for name, value in batch.items()} for batch in data for i in range(2)]
    args = TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("out")), per_device_train_batch_size=2, max_steps=STEPS,
        gradient_accumulation_steps=micro, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd",
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    run = Distilled(tiny(), args, train_dataset=rows)
    run.train()

    model, losses = tiny().train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        now = {**DRAWS, "step": step, "progress": step / (STEPS - 1)}
        parts = data[step * micro : (step + 1) * micro]
        counts = sum(self_distillation_counts(model, part, **now) for part in parts)
        total = sum(self_distillation_loss(model, part, **now, counts=counts) for part in parts)
        total.backward()
        clip_grad_norm_(model.parameters(), 1.0)
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
