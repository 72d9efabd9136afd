"""shifted_attention in the trainer: groups in training alone, however a step is batched, with LongLoRA's adapters."""

import pytest
from peft import LoraConfig
from support.training import WAYS, documents, logged, trainer

NORMS = ["embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"]


def test_a_step_is_one_mean_however_it_is_batched(tmp_path):
    options = {"train_dataset": documents(4), "max_steps": 1, "learning_rate": 0.0, "shuffle_dataset": False}
    share = {"padded": 0.25, "packed": 0.25 * 64 / 96}  # of max_length: 16 tokens in each
    results = {}
    for each in ("padded", "accumulated", "checkpointed", "packed"):
        run = trainer(tmp_path, **options, **WAYS[each], shifted_attention=share.get(each, 0.25))
        assert run._shifted.group == 16
        run.train()
        results[each] = logged(run, "loss", "grad_norm")[0]
    for way in ("accumulated", "checkpointed", "packed"):
        assert results[way] == pytest.approx(results["padded"], rel=1e-4)
    full = trainer(tmp_path, **options, **WAYS["padded"])
    full.train()
    assert logged(full, "loss")[0]["loss"] != pytest.approx(results["padded"]["loss"], rel=1e-3)


def test_evaluation_attends_to_all(tmp_path):
    options = {"train_dataset": documents(4), "eval_dataset": documents(4), "max_steps": 1, "learning_rate": 0.0}
    losses = []
    for shifted in (0.1, None):
        run = trainer(tmp_path, **options, shifted_attention=shifted)
        if shifted:
            run.train()
        losses.append(run.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


def test_longlora_trains_adapters_norms_and_embeddings(tmp_path):
    config = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=NORMS, task_type="CAUSAL_LM",
    )  # fmt: skip
    data = documents(2)
    options = {"peft_config": config, "train_dataset": data, "max_steps": 12, "learning_rate": 1e-2}
    run = trainer(tmp_path, **options, rescale="pi", rescale_args={"factor": 4.0}, shifted_attention=0.25)
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert sum("modules_to_save" in name for name in trained) == 1 + 1 + 2 * 3
    run.train()
    losses = [entry["loss"] for entry in logged(run, "loss")]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
