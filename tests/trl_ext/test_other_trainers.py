"""Views under trainers that are not ours: at learning rate 0 the loss is what it is without a view."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.tiny import VOCAB, tiny, tokens
from support.training import documents, logged, tokenizer, trainer
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from rope_patch import RopeViewCallback, patch_model, rope_view
from rope_patch.patch import view_source
from rope_patch.sidecar import read_sidecar
from rope_patch.views import Skip, Standard

LN2 = math.log(2)

COMMON = {
    "max_steps": 2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "learning_rate": 0.0,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
}


def words(n, seed):
    ids = torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def pairs(n=8):
    """Preference pairs whose two replies are not equally long."""
    return Dataset.from_list(
        [{"prompt": words(6, i), "chosen": " " + words(9, 50 + i), "rejected": " " + words(5, 90 + i)} for i in range(n)]
    )


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def saved(tmp_path):
    """A folder with the tiny model, from which trainers load their reference."""
    tiny().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def made(trainer_class, config_class, model, tmp_path, data, peft=False, extra=(), **options):
    args = config_class(output_dir=str(tmp_path / "run"), **{**COMMON, **options})
    return trainer_class(
        model=model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=lora() if peft else None,
        **dict(extra),
    )  # fmt: skip


def with_view(run):
    run.add_callback(RopeViewCallback(run))
    return run


def preference_data(kind):
    if kind == "dpo":
        return pairs()
    rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in pairs(4)]
    return Dataset.from_list(rows + [{**row, "completion": " " + words(4, i), "label": False} for i, row in enumerate(rows)])


PREFERENCES = {"dpo": (DPOTrainer, DPOConfig, LN2), "kto": (KTOTrainer, KTOConfig, 0.5)}


@pytest.mark.parametrize("peft", [False, True], ids=["ref_model", "adapters"])
@pytest.mark.parametrize("kind", PREFERENCES)
def test_policy_and_reference_draw_alike(kind, peft, saved, tmp_path):
    trainer_class, config_class, begins_at = PREFERENCES[kind]
    model = patch_model(load(saved), "skip", max_skip=64)
    run = with_view(made(trainer_class, config_class, model, tmp_path, preference_data(kind), peft))
    run.train()
    losses = [entry["loss"] for entry in logged(run, "loss")]
    assert losses == pytest.approx([begins_at] * 2, abs=1e-4)
    assert view_source(run.model).last is not None and not view_source(run.model).clock.is_set
