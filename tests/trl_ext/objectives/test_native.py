"""RopeSFTTrainer with objective="native-distill": normalisation, batches, what is logged, what is learned."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.tiny import gemma3, tiny
from support.training import WAYS, documents, logged, trainer

from rope_patch import patch_model
from trl_ext.data.long_documents import cut_ids

PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}
NATIVE = {"objective": "native-distill", **PI}
MIX = {"view": "mix", "view_args": {"views": ["standard", {"view": "pose", "target": 256, "chunks": 3}]}}


def by_hand(rows):
    """(mean KL over tokens, mean cross-entropy) of the untrained student at true positions, a document at a time."""
    kl = ce = tokens = labels = 0
    student, native = patch_model(tiny(), "pi", factor=4.0), tiny()
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            p, q = (model(ids).logits[0].double().log_softmax(-1) for model in (student, native))
        kl += (q.exp() * (q - p)).sum().item()
        ce -= p[:-1].gather(1, ids[0, 1:, None]).sum().item()
        tokens, labels = tokens + len(row), labels + len(row) - 1
    return kl / tokens, ce / labels


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_mean_over_its_tokens_and_its_labels_however_it_is_batched(way, tmp_path):
    data = documents(4)
    options = {"train_dataset": data, "eval_dataset": data, "max_steps": 1, "learning_rate": 0.0}
    run = trainer(tmp_path, objective_args={"clm_weight": 0.3}, **options, **NATIVE, **WAYS[way])
    run.train()
    (entry,) = logged(run, "loss", "kl", "ce", "num_tokens")
    kl, ce = by_hand(data["input_ids"])
    assert entry["kl"] == pytest.approx(kl, rel=1e-4) and entry["ce"] == pytest.approx(ce, rel=1e-4)
    assert entry["loss"] == pytest.approx(kl + 0.3 * ce, rel=1e-4)
    assert entry["num_tokens"] == sum(map(len, data["input_ids"]))
    metrics = run.evaluate()
    assert metrics["eval_kl"] == pytest.approx(kl, rel=1e-4) and metrics["eval_ce"] == pytest.approx(ce, rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_running_text_counts_beside_answers_as_a_mean_of_its_own(way, tmp_path):
    rows = documents(4)["input_ids"]
    answers = [[0] * (len(row) - 3 - k) + [1] * (3 + k) for k, row in enumerate(rows)]
    data = Dataset.from_dict({"input_ids": rows, "completion_mask": answers})
    objective_args = {"weight": 0.5, "clm_weight": 0.2, "text_weight": 0.3}
    options = {"train_dataset": data, "eval_dataset": data, "max_steps": 1, "learning_rate": 0.0}
    run = trainer(tmp_path, objective_args=objective_args, **options, **NATIVE, **WAYS[way])
    run.train()
    (entry,) = logged(run, "loss", "kl", "ce", "text_ce", "num_tokens")
    kl, text_ce = by_hand(rows)
    student = patch_model(tiny(), "pi", factor=4.0)
    ce = 0.0
    for row, labelled in zip(rows, answers, strict=True):
        with torch.no_grad():
            p = student(torch.tensor([row])).logits[0].double().log_softmax(-1)
        ce -= p[:-1].gather(1, torch.tensor(row)[1:, None])[torch.tensor(labelled[1:]).bool()].sum().item()
    ce /= sum(sum(labelled[1:]) for labelled in answers)
    assert entry["kl"] == pytest.approx(kl, rel=1e-4) and entry["ce"] == pytest.approx(ce, rel=1e-4)
    assert entry["text_ce"] == pytest.approx(text_ce, rel=1e-4) and entry["ce"] != pytest.approx(text_ce, rel=1e-3)
    assert entry["loss"] == pytest.approx(0.5 * kl + 0.2 * ce + 0.3 * text_ce, rel=1e-4)
    metrics = run.evaluate()
    assert metrics["eval_text_ce"] == pytest.approx(text_ce, rel=1e-4)
    assert metrics["eval_ce"] == pytest.approx(ce, rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_without_a_kl_answers_and_text_are_weighed_and_nothing_teaches(way, tmp_path):
    rows = documents(4)["input_ids"]
    answers = [[0] * (len(row) - 3 - k) + [1] * (3 + k) for k, row in enumerate(rows)]
    data = Dataset.from_dict({"input_ids": rows, "completion_mask": answers})
    options = {"train_dataset": data, "eval_dataset": data, "max_steps": 1, "learning_rate": 0.0, **NATIVE}
    weights = {"clm_weight": 0.2, "text_weight": 0.3}
    with_kl, without = (
        trainer(tmp_path / name, objective_args={"weight": weight, **weights}, **options, **WAYS[way])
        for name, weight in (("kl", 0.5), ("none", 0.0))
    )
    assert without._objective.teacher is None
    for run in (with_kl, without):
        run.train()
    (theirs,), (ours,) = (logged(run, "loss", "kl", "ce", "text_ce") for run in (with_kl, without))
    assert "kl" not in ours and ours["loss"] == pytest.approx(theirs["loss"] - 0.5 * theirs["kl"], rel=1e-4)
    assert ours["ce"] == pytest.approx(theirs["ce"]) and ours["text_ce"] == pytest.approx(theirs["text_ce"])
    metrics = without.evaluate()
    assert "eval_kl" not in metrics
    assert metrics["eval_ce"] == pytest.approx(ours["ce"]) and metrics["eval_text_ce"] == pytest.approx(ours["text_ce"])


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
    "objective_args", [{"clm_weight": 0.3}, {"weight": 0.5, "clm_weight": 0.3, "text_weight": 0.2}]
)
@pytest.mark.parametrize("way", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding-free"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_an_evaluation_leaves_the_cross_entropy_of_a_batch_without_labels_out(batch, way, objective_args, tmp_path):
    data = half_labelled()
    kl, text_ce = by_hand(data["input_ids"])
    _, ce = by_hand(data["input_ids"][::2])
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
        assert math.isnan(metrics["test_loss"])


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "copy"])
@pytest.mark.parametrize("way", ["accumulated", "checkpointed", "padding-free"])
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


def test_gaps_leave_the_sliding_layers_of_gemma3_where_they_are(tmp_path):
    """In a far text they see no gap; moved as well, they would take the untrained student far from its teacher."""
    options = {"max_steps": 2, "learning_rate": 0.0, "train_dataset": documents(8), "objective": "native-distill"}
    options |= {"rescale": "ntk", "rescale_args": {"factor": 32.0}, "per_device_train_batch_size": 4}
    pose = {"view": "pose", "target": 1024, "chunks": 3}
    mix = {"view": "mix", "view_args": {"views": ["standard", pose]}}
    results = {}
    for name, view in (("true", {}), ("far", mix)):
        model = gemma3()
        model.model.layers[1].self_attn.q_norm.weight.data.fill_(-0.9)  # the full layer asks a tenth as much of RoPE
        run = trainer(tmp_path, model=model, **view, **options)
        run.train()
        results[name] = sum(entry["kl"] for entry in logged(run, "kl"))
    assert 0 < results["true"] < results["far"] < 1e-4  # with gaps in both layers 8e-3


def test_the_native_model_at_true_positions_has_nothing_to_learn_from_itself(tmp_path):
    run = trainer(
        tmp_path,
        objective="native-distill",
        objective_args={"clm_weight": 1e-9},
        max_steps=1,
        eval_dataset=documents(2),
    )
    assert abs(run.evaluate()["eval_kl"]) < 1e-6
    run.train()
    (entry,) = logged(run, "loss", "grad_norm", "kl")
    assert abs(entry["kl"]) < 1e-6 and entry["grad_norm"] < 1e-5
    with pytest.raises(ValueError, match="have the same RoPE"):
        trainer(tmp_path, objective="native-distill", objective_args={"clm_weight": 0.0})


@pytest.mark.parametrize("view", [{}, MIX], ids=["standard", "mix"])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_training_brings_the_rescaled_model_to_the_native_one(view, peft, tmp_path):
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if peft else None
    data = documents(2)
    options = {"peft_config": config, "train_dataset": data, "eval_dataset": data, "learning_rate": 3e-3}
    run = trainer(tmp_path, max_steps=40, objective_args={"clm_weight": 0.0}, **NATIVE, **view, **options)
    before = run.evaluate()
    run.train()
    after = run.evaluate()
    assert after["eval_kl"] < 0.7 * before["eval_kl"] and after["eval_loss"] == pytest.approx(after["eval_kl"])
    steps = logged(run, "loss", "ce")
    assert not any("ce" in entry for entry in steps) and "eval_ce" in after
    assert sum(e["loss"] for e in steps[-8:]) < 0.7 * sum(e["loss"] for e in steps[:8])


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
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("objective", ["native-distill", "hidden-distill"])
def test_documents_that_labels_are_a_part_of_stay_whole_and_what_truncation_takes_is_told(
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
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **NATIVE, **MIX}
    whole = trainer(tmp_path / "a", **options)
    whole.train()
    again = trainer(tmp_path / "b", teacher_offload=True, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    names = ("loss", "kl", "grad_norm", "view")
    assert logged(again, *names)[-2:] == logged(whole, *names)[-2:]
    taken = [entry["view/taken_0"] + entry["view/taken_1"] for entry in logged(whole, "view")]
    assert taken == [1.0] * 4


def test_documents_beyond_the_window_of_the_teacher_stop_a_run_before_its_first_step(tmp_path):
    data = Dataset.from_list([{"input_ids": [*range(3, 3 + n)]} for n in [12] * 4 + [24]])
    with pytest.raises(ValueError, match="documents of at most 23 tokens, its context window, got one of 24"):
        trainer(tmp_path, model=tiny(max_position_embeddings=23), train_dataset=data, **NATIVE)
