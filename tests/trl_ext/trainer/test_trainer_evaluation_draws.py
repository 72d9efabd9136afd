"""Draws belong to documents: neither the batch that one comes in, nor the evaluation or rank, changes what it gets."""

import pytest
import torch
from support.tiny import WINDOW, tiny, tokens
from support.training import documents, logged, trainer

from rope_patch import patch_model
from rope_patch.patch import view_source
from trl_ext.trainer.callbacks import LossByPositionCallback

WAYS = {"packed rows": {"padding_free": True, "max_length": None}, "rows": {}}


def watch_indices(run):
    """List that each forward adds the RoPE indices of each of its documents to."""
    source, seen = view_source(run.model), []
    bind = source.bind

    def watched(batch):
        bound = bind(batch)
        positions = batch.position_ids
        if positions is None:
            positions = torch.arange(batch.seq_len).expand(batch.rows, -1)
        index = bound(positions).expand(batch.rows, -1)
        ordinal = bound.documents.ordinal.expand_as(index)
        length = bound.documents.length.expand_as(index)
        for i in range(int(ordinal.max()) + 1):
            one = ordinal == i
            seen.append(index[one][: int(length[one][0])].tolist())
        return bound

    source.bind = watched
    return seen


@pytest.mark.parametrize(("when", "way"), [("train", "packed rows"), ("train", "rows"), ("always", "packed rows")])
def test_every_evaluation_draws_the_same_for_a_document_at_any_batch_size(when, way, tmp_path):
    data, runs = documents(8, longest=12, seed=3), []  # of one length, so that means over batches are comparable
    for batch_size in (3, 8):
        model = tiny()
        options = {"objective": "self-distill", "view": "skip"}
        if when == "always":
            patch_model(model, "skip", when="always", seed=42)
            options = {}
        run = trainer(
            tmp_path, model=model, train_dataset=documents(4), eval_dataset=data,
            per_device_eval_batch_size=batch_size, max_steps=1, **options, **WAYS[way],
        )  # fmt: skip
        seen = watch_indices(run)
        before = run.evaluate()
        first, seen[:] = list(seen), []
        assert len(first) == 8 and len({str(index) for index in first}) > 4, "each document has a draw of its own"
        again = run.evaluate()
        assert seen == first and all(again[name] == before[name] for name in before if "loss" in name or "kl" in name)
        seen.clear()
        if when == "train":  # elsewhere TRL runs a prediction's forward twice
            run.predict(data)
            assert seen == first
            seen.clear()
        run.train()
        assert not [index for index in seen if index in first], "training draws others"
        seen.clear()
        run.evaluate()
        assert seen == first, "and leaves those of evaluations alone"
        runs.append((first, before["eval_loss"], before.get("eval_kl")))
    for draws, loss, kl in runs[1:]:
        assert draws == runs[0][0]
        assert loss == pytest.approx(runs[0][1], rel=1e-5)
        assert kl is None if when == "always" else kl == pytest.approx(runs[0][2], rel=1e-4)


def test_several_evaluation_sets_each_begin_anew_and_keep_their_parts_apart(tmp_path):
    sets = {"a": documents(6, seed=3), "b": documents(6, seed=3), "c": documents(6, seed=4)}
    run = trainer(tmp_path, eval_dataset=sets, objective="self-distill", view="skip")
    metrics = run.evaluate()
    assert metrics["eval_a_kl"] == metrics["eval_b_kl"] != metrics["eval_c_kl"]
    assert run.evaluate(sets["a"])["eval_kl"] == metrics["eval_a_kl"]
    predicted = run.predict(sets["a"]).metrics
    assert predicted["test_kl"] == metrics["eval_a_kl"]


def test_losses_by_position_draw_the_same_each_time_and_leave_training_alone(tmp_path):
    alone, measured = (
        trainer(tmp_path, model=patch_model(tiny(), "skip", when="always", seed=42), learning_rate=0.0)
        for _ in range(2)
    )
    measured.add_callback(LossByPositionCallback(measured, tokens(3, 2 * WINDOW), every=1))
    seen = watch_indices(measured)
    for run in (alone, measured):
        run.train()
    assert len({entry["long/cliff"] for entry in measured.state.log_history if "long/cliff" in entry}) == 1
    draws = [hash(tuple(index)) for index in seen if len(index) == 2 * WINDOW]
    assert draws == 4 * draws[:3] and len(set(draws)) == 3, "each row has a draw of its own"
    assert logged(measured, "loss", "view/") == logged(alone, "loss", "view/")


@pytest.mark.parametrize("view", ["skip", "posaug"])
def test_a_document_trains_under_the_same_indices_whatever_shares_its_batch(view, tmp_path):
    ways = [
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "padding_free": True, "max_length": None},
    ]
    runs = []
    for way in ways:
        run = trainer(tmp_path, train_dataset=documents(8), view=view, max_steps=2, learning_rate=0.0, **way)
        seen = watch_indices(run)
        run.train()
        runs.append(seen)
    assert len(runs[0]) == 8 and len({str(index) for index in runs[0]}) > 2
    assert all(run == runs[0] for run in runs[1:])
