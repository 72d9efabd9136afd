"""objective="relation-distill" in the trainer: normalisation, batches, what is trained, resuming, errors."""

import pytest
import torch
from peft import LoraConfig
from support.tiny import VOCAB, tiny
from support.training import WAYS, documents, logged, trainer
from transformers import AutoModelForCausalLM

from rope_patch import describe, load_adapter, patch_model
from rope_patch.losses import relation_loss
from trl_ext import RopeSFTConfig

RELATION = {"objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")


LAST, TEMPERATURE = 3, 1.5


def by_hand(rows):
    """Mean relation loss over tokens, and mean KL of logits over the last tokens, of the untrained student.

    A document at a time.
    """
    model = patch_model(tiny(), "pi", factor=4.0)
    relation = logit_kl = tokens = 0
    for row in rows:
        ids = torch.tensor([row])
        tokens += len(row)
        with torch.no_grad():
            relation += relation_loss(model, tiny(), {"input_ids": ids}, n_tokens=1).item()
            p, q = ((m(ids).logits[0, -LAST:].double() / TEMPERATURE).log_softmax(-1) for m in (model, tiny()))
        logit_kl += (q.exp() * (q - p)).sum().item()
    return relation / tokens, logit_kl / (LAST * len(rows))


def test_a_step_is_the_mean_over_its_tokens_and_the_last_ones_however_it_is_batched(tmp_path):
    data, norms = documents(4), []
    options = {"train_dataset": data, "max_steps": 1, "learning_rate": 0.0, **RELATION}
    options["objective_args"] = {"logit_kl": {"weight": 2.0, "last": LAST, "temperature": TEMPERATURE}}
    relation, logit_kl = by_hand(data["input_ids"])
    for way in ("padded", "checkpointed", "packed"):
        run = trainer(tmp_path, **options, **WAYS[way])
        run.train()
        (entry,) = logged(run, "loss", "grad_norm", "relation", "num_tokens")
        assert entry["relation/logit_kl"] == pytest.approx(logit_kl, rel=1e-4)
        assert entry["loss"] == pytest.approx(relation + 2 * logit_kl, rel=1e-4)
        assert entry["num_tokens"] == sum(map(len, data["input_ids"]))
        norms.append(entry["grad_norm"])
    assert norms == pytest.approx(3 * norms[:1], rel=1e-4)


def test_training_brings_the_student_to_its_teacher(tmp_path):
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    data = documents(2)
    options = {"peft_config": config, "train_dataset": data, "eval_dataset": data, "learning_rate": 1e-2}
    run = trainer(tmp_path, max_steps=12, **RELATION, **options)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.7 * before
    assert logged(run, "loss")[0]["loss"] == pytest.approx(before, rel=1e-5), "training and evaluation have one loss"


def test_qlora(tmp_path):
    """A 4-bit base with LoRA: the teacher is the 4-bit model, evaluation leaves it trainable."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "base")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def load():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings)

    data = documents(2)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"train_dataset": data, "eval_dataset": data, "learning_rate": 1e-2, "max_steps": 8}
    run = trainer(tmp_path / "run", model=load(), peft_config=config, **RELATION, **options)
    ids = torch.tensor([data["input_ids"][0]])
    with torch.no_grad(), run._objective.forward_loss.teacher.ready() as decoder:
        # in training mode: in evaluation, bitsandbytes has another product for some CPUs
        assert torch.equal(decoder(ids).last_hidden_state, load().train().model(ids).last_hidden_state)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert min(entry["grad_norm"] for entry in logged(run, "grad_norm")) > 0
    assert run.evaluate()["eval_loss"] < 0.8 * before


def test_only_q_k_and_v_are_trained_on_request_and_the_result_is_a_plain_checkpoint(tmp_path):
    run = trainer(tmp_path / "run", trainable="qkv", weight_decay=0.1, max_steps=1, **RELATION)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.train()
    moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj")}
    run.model.save_pretrained(tmp_path / "saved")
    ids = torch.randint(3, VOCAB, (1, 80))
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits
        torch.testing.assert_close(plain, run.model.eval()(ids).logits)


def test_the_teacher_costs_no_second_copy_and_stays(tmp_path):
    run = trainer(tmp_path, peft_config=lora(), max_steps=1, **RELATION)
    teacher = run._objective.forward_loss.teacher
    assert not hasattr(teacher, "copy")
    ids = torch.randint(3, VOCAB, (1, 30))
    with torch.no_grad(), teacher.ready() as decoder:
        before = decoder(ids).last_hidden_state
    run.train()
    with torch.no_grad(), teacher.ready() as decoder:
        assert torch.equal(decoder(ids).last_hidden_state, before)
    with torch.no_grad():
        assert torch.equal(tiny().model(ids).last_hidden_state, before)


def test_resuming_gives_the_same_run(tmp_path):
    options = {
        "peft_config": lora(), "max_steps": 3, "save_strategy": "steps", "save_steps": 2, **RELATION,
        "objective_args": {"logit_kl": {"weight": 0.3, "last": 4}},
    }  # fmt: skip
    whole = trainer(tmp_path / "a", **options)
    whole.train()
    again = trainer(tmp_path / "b", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    names = ("loss", "relation", "grad_norm")
    assert logged(again, *names)[2:] == logged(whole, *names)[2:]
    assert set(logged(whole, "relation")[0]) == {"relation/q", "relation/k", "relation/v", "relation/logit_kl"}
    loaded = load_adapter(tiny(), tmp_path / "a" / "checkpoint-3")
    assert describe(loaded).rescaling == "pi (factor 4.0)"


def test_a_logit_kl_of_weight_0_is_logged_and_changes_no_bit(tmp_path):
    options = {"train_dataset": documents(4), "max_steps": 2, **WAYS["mixed"], **RELATION}
    without, monitored = (
        trainer(tmp_path / name, objective_args={"logit_kl": logit_kl}, **options)
        for name, logit_kl in (("without", None), ("monitored", {"weight": 0.0, "last": 4}))
    )
    for run in (without, monitored):
        run.train()
    weights = dict(monitored.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in without.model.named_parameters())
    steps = logged(monitored, "loss", "grad_norm", "relation")
    assert all(step.pop("relation/logit_kl") > 0 for step in steps)
    assert steps == logged(without, "loss", "grad_norm", "relation")
    assert monitored._record.method == without._record.method, "one may be resumed as the other"


def test_what_cannot_be_trained_is_refused(tmp_path):
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="Set gradient_checkpointing_kwargs={'use_reentrant': False}"):
        trainer(tmp_path, **RELATION, **reentrant)
    with pytest.raises(ValueError, match="have the same RoPE"):
        trainer(tmp_path, objective="relation-distill")
    with pytest.raises(ValueError, match="name target_modules in peft_config instead"):
        trainer(tmp_path, trainable="qkv", peft_config=lora(), **RELATION)


@pytest.mark.parametrize("options", [{"rope": "pre"}, {"q": 0.0, "k": 0.0}, {"q": 0.0, "rope": "pre"}])
def test_relations_that_are_alike_from_the_start_are_no_target(options, tmp_path):
    config = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **RELATION}
    with pytest.raises(ValueError, match="teacher and student have the same first layer without RoPE"):
        RopeSFTConfig(objective_args={"layers": [0], **options, "logit_kl": {"weight": 0.0, "last": 5}}, **config)
    RopeSFTConfig(objective_args={"layers": [0], **options, "logit_kl": {"weight": 0.5, "last": 5}}, **config)
    for other in ({"layers": [0, 1]}, {"layers": [0], "attention": 1.0}):
        RopeSFTConfig(objective_args={**options, **other}, **config)
