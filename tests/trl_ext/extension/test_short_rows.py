"""Short rows that go through the model together give the gradients that they give one by one."""

import random

import pytest
import torch
from datasets import Dataset
from support.tiny import tiny
from support.training import tokenizer
from transformers import TrainerCallback

from rope_patch import patch_model
from trl_ext import RopeSFTConfig, RopeSFTTrainer, extend
from trl_ext.extension.plan import _batches
from trl_ext.extension.short_rows import ShortRowsTrainer, batches_a_step, join
from trl_ext.trainer.step_batches import FIRST_SAMPLE

LONG, SHORT = 32, 8
LENGTHS = [SHORT, SHORT, LONG, SHORT, SHORT, SHORT, SHORT, SHORT, LONG, SHORT]
FAR = {"skip": {"law": "uniform", "high": 16}}
WAYS = {
    "next token": {"objective": "clm"},
    "next token under a skip": {"objective": "clm", "view": "skip", "view_args": FAR},
    "self-distillation": {"objective": "self-distill", "view": "skip", "view_args": FAR},
    "kept by a teacher": {
        "objective": "native-distill", "view": "mix",
        "view_args": {"views": ["standard", {"view": "pose", "target": 64, "chunks": 4}]},
        "objective_args": {"weight": 1.0, "clm_weight": 1.0, "text_weight": 0.3},
    },
}  # fmt: skip


class _Gradients(TrainerCallback):
    """Keeps those of every step, and the tokens of every forward."""

    def __init__(self, model):
        self.model, self.steps, self.shapes = model, [], []
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: self.shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})


def trained(trainer_class, folder, way):
    torch.manual_seed(0)
    model = patch_model(tiny(window=LONG).double(), "ntk", factor=2.0)
    args = RopeSFTConfig(
        output_dir=str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=len(LENGTHS) // 2,
        num_train_epochs=1, max_length=LONG, learning_rate=0.0, max_grad_norm=0, use_cpu=True, report_to="none",
        logging_steps=1, save_strategy="no", gradient_checkpointing=False, **WAYS[way],
    )  # fmt: skip
    rng = random.Random(0)
    ids = [[rng.randrange(4, 60) for _ in range(n)] for n in LENGTHS]
    rows = {"input_ids": ids, "completion_mask": [[int(rng.random() < 0.7) for _ in row] for row in ids]}
    trainer = trainer_class(model, args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer())
    gradients = _Gradients(trainer.model)
    trainer.add_callback(gradients)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return gradients, logs


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_gradients_and_losses_of_a_step_are_those_of_one_row_at_a_time(way, tmp_path):
    alone, logged_alone = trained(RopeSFTTrainer, tmp_path / "alone", way)
    joined, logged = trained(ShortRowsTrainer, tmp_path / "joined", way)
    assert len(joined.steps) == len(alone.steps) == 2
    for one, other in zip(alone.steps, joined.steps, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-7)
    for one, other in zip(logged_alone, logged, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert len(joined.shapes) < len(alone.shapes), "fewer forwards"
    if way != "self-distillation":  # which reads copies of suffixes
        assert max(rows * tokens for rows, tokens in joined.shapes) <= LONG, "no more tokens at a time than a long row"


def batch(tokens, first, **more):
    return {"input_ids": torch.arange(tokens)[None], "labels": torch.arange(tokens)[None], FIRST_SAMPLE: first, **more}


def test_neighbours_of_the_same_length_are_joined_up_to_so_many_tokens():
    lengths = [8, 8, 32, 8, 8, 8, 8, 8, 4, 16, 16, 16]
    joined = join([batch(n, k) for k, n in enumerate(lengths)], 32)
    assert [tuple(b["input_ids"].shape) for b in joined] == [
        (2, 8), (1, 32), (4, 8), (1, 8), (1, 4), (2, 16), (1, 16)
    ]  # fmt: skip
    assert [b[FIRST_SAMPLE] for b in joined] == [0, 2, 3, 7, 8, 9, 11]


def test_rows_of_several_documents_stay_alone():
    packed = [batch(8, 2 * k, position_ids=torch.arange(8)[None] % 4) for k in range(2)]
    assert join(packed, 32) == packed


def test_a_loss_that_is_a_mean_of_each_batch_keeps_its_batches(tmp_path):
    class TakesNoCount(ShortRowsTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False
            self.compute_loss_func = None

    run, _ = trained(TakesNoCount, tmp_path, "next token")
    assert [shape[0] for shape in run.shapes] == [1] * len(LENGTHS)


def test_the_batches_of_a_step_are_counted_as_they_come_on_average():
    rng, rows, short, most = random.Random(0), 8, 0.7, 8
    drawn = [[SHORT if rng.random() < short else SHORT * most for _ in range(rows)] for _ in range(4000)]
    mean = sum(len(join([batch(n, 0) for n in step], SHORT * most)) for step in drawn) / len(drawn)
    assert batches_a_step(rows, short, most) == pytest.approx(mean, rel=0.02)
    assert batches_a_step(8, 0.0, 8) == 8 and batches_a_step(1, 0.5, 8) == 1 and batches_a_step(16, 1.0, 8) == 2


def test_the_plan_counts_how_many_go_together(folder):
    options = {"to": 1600, "data": "books.jsonl", "output": "out", "device": "cpu", "dry_run": True, "rows": 24}
    options |= {"shares": {"text": 1.0}, "lengths": (1600,)}
    many, one = (extend("base", **options, **more) for more in ({}, {"rows_per_step": 1}))
    assert _batches(many.choices, many.options) < 0.7 * many.rows
    assert _batches(one.choices, one.options) == pytest.approx(many.rows)
