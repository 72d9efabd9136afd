"""RopeSFTTrainer with objective="native-distill": normalisation, batches, what is logged, what is learned."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.tiny import tiny
from support.training import WAYS, documents, logged, trainer

from rope_patch import patch_model
from trl_ext.data.long_documents import cut_ids

PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}
NATIVE = {"objective": "native-distill", **PI}
MIX = {"view": "mix", "view_args": {"views": ["standard", {"view": "pose", "target": 256, "chunks": 3}]}}


def by_hand(rows, answers=None):
    """(mean KL over tokens, mean cross-entropy over answers, and over all tokens) of the untrained student.

    A document at a time, at true positions; without `answers` every token with a token before it is one.
    """
    kl = ce = text_ce = tokens = labels = 0
    student, native = patch_model(tiny(), "pi", factor=4.0), tiny()
    for row, answer in zip(rows, answers or [[1] * len(row) for row in rows], strict=True):
        ids, has_label = torch.tensor([row]), torch.tensor(answer[1:]).bool()
        with torch.no_grad():
            p, q = (model(ids).logits[0].double().log_softmax(-1) for model in (student, native))
        nll = -p[:-1].gather(1, ids[0, 1:, None])[:, 0]
        kl += (q.exp() * (q - p)).sum().item()
        ce, text_ce = ce + nll[has_label].sum().item(), text_ce + nll.sum().item()
        tokens, labels = tokens + len(row), labels + sum(answer[1:])
    return kl / tokens, ce / labels, text_ce / (tokens - len(rows))


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        ("checkpointed", {"weight": 0.5, "clm_weight": 0.2, "text_weight": 0.3}),
        ("packed", {"weight": 1.0, "clm_weight": 0.3}),
        ("accumulated", {"weight": 0.0, "clm_weight": 0.2, "text_weight": 0.3}),
        ("padding-free", {"weight": 0.5, "clm_weight": 0.2, "text_weight": 0.3}),
    ],
)
def test_a_step_has_means_over_its_tokens_its_labels_and_its_text_however_it_is_batched(way, weights, tmp_path):
    rows = documents(4)["input_ids"]
    answers = [[0] * (len(row) - 3 - k) + [1] * (3 + k) for k, row in enumerate(rows)]
    data = Dataset.from_dict({"input_ids": rows, "completion_mask": answers})
    options = {"train_dataset": data, "eval_dataset": data, "max_steps": 1, "learning_rate": 0.0}
    run = trainer(tmp_path, objective_args=weights, **options, **NATIVE, **WAYS[way])
    assert (run._objective.teacher is None) == (not weights["weight"])
    run.train()
    (entry,) = logged(run, "loss", "kl", "ce", "text_ce", "num_tokens")
    means = dict(zip(("kl", "ce", "text_ce"), by_hand(rows, answers), strict=True))
    of_loss = {"kl": weights["weight"], "ce": weights["clm_weight"], "text_ce": weights.get("text_weight", 0.0)}
    expected = {name: mean for name, mean in means.items() if of_loss[name]}
    expected["loss"] = sum(weight * means[name] for name, weight in of_loss.items())
    assert entry == pytest.approx({**expected, "num_tokens": sum(map(len, rows))}, rel=1e-4)
    metrics = run.evaluate()
    measured = {name: metrics.get(f"eval_{name}") for name in ("kl", "ce", "text_ce")}
    assert {name: value for name, value in measured.items() if value is not None} == pytest.approx(
        {name: mean for name, mean in means.items() if of_loss[name]}, rel=1e-4
    )


@pytest.mark.parametrize(("objective_args", "reads"), [({"clm_weight": 1.0}, False), ({"text_weight": 0.1}, True)])
def test_documents_without_labels_teach_only_where_all_tokens_count(objective_args, reads, tmp_path):
    rows = documents(2).map(lambda row: {"labels": [-100] * len(row["input_ids"])})
    options = {"train_dataset": rows, "objective_args": {"weight": 0.0, "clm_weight": 0.0, **objective_args}, **NATIVE}
    if reads:
        trainer(tmp_path, max_steps=1, **options).train()
    else:
        with pytest.raises(ValueError, match="none of its 2 documents has"):
            trainer(tmp_path, **options)


def half_labelled(n=4):
    """Documents of which every second one has no label."""
    rows = documents(n)["input_ids"]
    return Dataset.from_list(
        [{"input_ids": row, "labels": [-100] * len(row) if i % 2 else row} for i, row in enumerate(rows)]
    )


@pytest.mark.parametrize(
    ("batch", "way", "objective_args"),
    [
        (1, {}, {"clm_weight": 0.3}),
        (3, {"padding_free": True, "max_length": None}, {"weight": 0.5, "clm_weight": 0.3, "text_weight": 0.2}),
    ],
    ids=["padded", "padding-free"],
)
def test_an_evaluation_leaves_the_cross_entropy_of_a_batch_without_labels_out(batch, way, objective_args, tmp_path):
    data = half_labelled()
    kl, _, text_ce = by_hand(data["input_ids"])
    _, ce, _ = by_hand(data["input_ids"][::2])
    sets = {"part": data, "plain": documents(4)}
    run = trainer(
        tmp_path, eval_dataset=sets, objective_args=objective_args, per_device_eval_batch_size=batch, **NATIVE, **way
    )
    weights = {"weight": 1.0, "text_weight": 0.0, **objective_args}
    wanted = weights["weight"] * kl + weights["clm_weight"] * ce + weights["text_weight"] * text_ce
    metrics = run.evaluate()
    assert metrics["eval_part_ce"] == pytest.approx(ce, rel=1e-4)
    assert metrics["eval_part_loss"] == pytest.approx(wanted, rel=1e-4)
    assert run.predict(data).metrics["test_loss"] == pytest.approx(wanted, rel=1e-4)
    assert metrics["eval_plain_loss"] != pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_an_evaluation_without_any_label_has_the_kl_alone_or_nothing(weight, tmp_path):
    data = documents(3).map(lambda row: {"labels": [-100] * len(row["input_ids"])})
    objective_args = {"weight": weight, "clm_weight": 0.3}
    metrics = trainer(tmp_path, objective_args=objective_args, **NATIVE).predict(data).metrics
    assert "test_ce" not in metrics
    if weight:
        assert metrics["test_loss"] == metrics["test_kl"] > 0
    else:
        with pytest.warns(FutureWarning, match="return_outputs"):  # TRL's own, of any prediction
            stock = trainer(tmp_path).predict(data).metrics
        assert metrics["test_loss"] == stock["test_loss"] == 0


@pytest.mark.parametrize(("way", "adapters"), [("checkpointed", True), ("padding-free", False)])
def test_a_mix_of_views_trains_alike_however_a_step_is_batched(way, adapters, tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    options = {"train_dataset": documents(4), "max_steps": 2, "learning_rate": 0.0, "shuffle_dataset": False}
    options |= {"peft_config": config if adapters else None, **NATIVE, **MIX}
    runs = []
    for each in ("padded", way):
        torch.manual_seed(0)  # of the adapters
        run = trainer(tmp_path, **options, **WAYS[each])
        run.train()
        runs.append(logged(run, "loss", "kl", "ce", "grad_norm"))
    assert runs[0][0]["kl"] != runs[0][1]["kl"], "steps draw anew"
    for first, second in zip(*runs, strict=True):
        for name in first:
            assert first[name] == pytest.approx(second[name], rel=1e-4)


def test_the_native_model_at_true_positions_has_nothing_to_learn_from_itself(tmp_path):
    options = {"objective": "native-distill", "max_steps": 1}
    run = trainer(tmp_path, objective_args={"clm_weight": 1e-9}, eval_dataset=documents(2), **options)
    assert abs(run.evaluate()["eval_kl"]) < 1e-6
    run.train()
    (entry,) = logged(run, "loss", "grad_norm", "kl")
    assert abs(entry["kl"]) < 1e-6 and entry["grad_norm"] < 1e-5
    with pytest.raises(ValueError, match="have the same RoPE"):
        trainer(tmp_path, objective_args={"clm_weight": 0.0}, **options)


@pytest.mark.parametrize(("view", "peft"), [({}, False), (MIX, True)], ids=["full-standard", "lora-mix"])
def test_training_brings_the_rescaled_model_to_the_native_one(view, peft, tmp_path):
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if peft else None
    data = documents(2)
    options = {"peft_config": config, "train_dataset": data, "eval_dataset": data, "learning_rate": 3e-3}
    run = trainer(tmp_path, max_steps=14, objective_args={"clm_weight": 0.0}, **NATIVE, **view, **options)
    before = run.evaluate()
    run.train()
    after = run.evaluate()
    assert after["eval_kl"] < 0.7 * before["eval_kl"] and after["eval_loss"] == pytest.approx(after["eval_kl"])
    steps = logged(run, "loss", "ce")
    assert not any("ce" in entry for entry in steps) and "eval_ce" in after
    assert sum(e["loss"] for e in steps[-4:]) < 0.7 * sum(e["loss"] for e in steps[:4])


@pytest.mark.filterwarnings("ignore:.*keep_end")
@pytest.mark.parametrize(
    "way",
    [{"max_length": 64}, {"max_length": 16, "long_documents": "split"}, {"packing": True, "max_length": 96}],
    ids=str,
)
def test_rows_without_labels_are_read_for_their_kl(way, tmp_path, caplog):
    """Prompts are masked, and a step may have no answer at all: TRL itself drops such rows as it truncates."""
    rows = documents(4)["input_ids"]
    data = Dataset.from_list([{"input_ids": row, "labels": [-100] * len(row)} for row in rows])
    options = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 8, "truncation_mode": "keep_end"}
    run = trainer(tmp_path, train_dataset=data, **options, **NATIVE, **way)
    if way["max_length"] == 16:
        assert "4 documents longer than max_length cut into rows that are all read. Left out: nothing" in caplog.text
        rows = [part for row in rows for part in cut_ids(row, 16, ())]
    run.train()
    (entry,) = logged(run, "loss", "kl", "ce")
    assert set(entry) == {"loss", "kl"} and entry["loss"] == pytest.approx(by_hand(rows)[0], rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*keep_end")
@pytest.mark.parametrize(("objective", "mode"), [("native-distill", "keep_start"), ("hidden-distill", "keep_end")])
def test_documents_that_labels_are_a_part_of_stay_whole_and_what_truncation_takes_is_logged(
    objective, mode, tmp_path, caplog
):
    rows = documents(4)["input_ids"]
    data = Dataset.from_list(
        [{"input_ids": row, "labels": [-100] * 7 + row[7:8] + [-100] * len(row[8:])} for row in rows]
    )
    options = {**NATIVE, "objective": objective, "max_length": 10, "truncation_mode": mode, "shuffle_dataset": False}
    run = trainer(tmp_path, train_dataset=data, **options)
    lost = sum(max(len(row) - 10, 0) for row in rows)
    share = f"{lost / sum(map(len, rows)):.1%} of all"
    assert f"in 4 rows of at most 10. Left out: {lost} tokens ({share}) behind max_length in 4 documents" in caplog.text
    part = slice(10) if mode == "keep_start" else slice(-10, None)
    assert run.train_dataset["input_ids"] == [row[part] for row in rows]


def test_resuming_and_offloading_give_the_same_run(tmp_path):
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, **NATIVE, **MIX}
    whole = trainer(tmp_path / "a", **options)
    whole.train()
    again = trainer(tmp_path / "b", teacher_offload=True, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    names = ("loss", "kl", "grad_norm", "view")
    assert logged(again, *names)[2:] == logged(whole, *names)[2:]
    taken = [entry["view/taken_0"] + entry["view/taken_1"] for entry in logged(whole, "view")]
    assert taken == [1.0] * 3


def test_documents_beyond_the_window_of_the_teacher_stop_a_run_before_its_first_step(tmp_path):
    data = Dataset.from_list([{"input_ids": [*range(3, 3 + n)]} for n in [12] * 4 + [24]])
    with pytest.raises(ValueError, match="documents of at most 23 tokens, its context window, got one of 24"):
        trainer(tmp_path, model=tiny(max_position_embeddings=23), train_dataset=data, **NATIVE)
