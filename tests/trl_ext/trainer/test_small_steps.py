"""A warning where a dtype rounds the steps of training away, held against what AdamW really moves."""

import logging

import pytest
import torch
from peft import LoraConfig
from support.tiny import tiny
from support.training import trainer
from torch import nn

from rope_patch import load_adapter, patch_model
from trl_ext.trainer.small_steps import lost_share, warn_of_lost_steps


@pytest.mark.parametrize("rate", [2e-5, 2e-4, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_share_is_that_which_adamw_leaves(dtype, rate):
    weight = nn.Parameter((0.02 * torch.randn(300, 200, generator=torch.manual_seed(0))).to(dtype))
    before = weight.detach().clone()
    predicted = lost_share(weight, rate)
    weight.grad = -torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=rate, weight_decay=0.0).step()
    assert predicted == pytest.approx((weight == before).double().mean().item(), abs=0.03)


def test_only_trained_weights_of_16_bits_count(monkeypatch):
    said = []
    monkeypatch.setattr("trl_ext.trainer.small_steps.logger.warning", said.append)
    model = tiny(dtype=torch.bfloat16)
    warn_of_lost_steps(model, 0.0)
    warn_of_lost_steps(tiny(), 2e-5)
    warn_of_lost_steps(model.requires_grad_(False), 2e-5)
    assert not said
    model.model.norm.weight.requires_grad_(True)  # ones: nothing below 0.004 moves them
    warn_of_lost_steps(model, 2e-3)
    assert len(said) == 1 and said[0].startswith("100% of the trained weights in bfloat16")
    assert "learning_rate=0.002" in said[0] and "{'dtype': 'float32'}" in said[0]


def test_the_trainer_says_so_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("trl_ext.trainer.small_steps.logger.warning", said.append)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    options = {"learning_rate": 2e-5, "max_steps": 1}
    trainer(tmp_path, model=tiny(dtype=torch.bfloat16), peft_config=lora, **options).train()
    assert not said, "PEFT keeps adapters in float32"
    trainer(tmp_path, model=tiny(dtype=torch.bfloat16), **options).train()
    assert len(said) == 1


def test_a_model_by_name_is_not_told_to_train_bfloat16_weights(tmp_path, caplog):
    tiny().save_pretrained(tmp_path / "model")
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    logger = logging.getLogger("trl_ext.trainer.trainer")
    logger.addHandler(caplog.handler)
    try:
        trainer(tmp_path, model=str(tmp_path / "model"))
        assert "dtype" not in caplog.text
        trainer(tmp_path, model=str(tmp_path / "model"), peft_config=lora)
        assert "model_init_kwargs={'dtype': 'bfloat16'}" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_the_rescaling_of_a_loaded_adapter_is_not_applied_twice(tmp_path):
    first = trainer(tmp_path, rescale="pi", rescale_args={"factor": 2.0}, max_steps=1, peft_config=LoraConfig(r=2))
    first.save_model(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"trained with pi \(factor 2.0\), .* Leave rescale out to go on"):
        model = load_adapter(tiny(), tmp_path / "adapter", is_trainable=True)
        trainer(tmp_path, model=model, rescale="pi", rescale_args={"factor": 2.0})
    on_top = trainer(tmp_path, model=model, rescale="pi", rescale_args={"factor": 4.0})
    assert on_top.model.config.rope_parameters["factor"] == 8.0
    assert patch_model(tiny(), "pi", factor=8.0).config.rope_parameters == on_top.model.config.rope_parameters
