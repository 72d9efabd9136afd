"""A trainer takes no model by name of which a weight is missing, misshapen or damaged."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from trl import SFTTrainer

import trl_ext.trainer.whole_weights as module
from trl_ext import RopeSFTConfig, RopeSFTTrainer

MODEL = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    tiny(vocab_size=CHARACTERS).save_pretrained(tmp_path / "tiny")
    character_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def args(folder, **options):
    defaults = {"max_steps": 2, "max_length": 16, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
    return RopeSFTConfig(output_dir=str(folder / "run"), **defaults | options)


def rows():
    return Dataset.from_dict({"text": ["one text", "and another"]})


def changed(folder, change):
    weights = load_file(folder / MODEL)
    change(weights)
    save_file(weights, folder / MODEL, metadata={"format": "pt"})


def missing(folder):
    changed(folder, lambda weights: weights.pop("model.norm.weight"))


def misshapen(folder):
    changed(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))


def damaged(folder):
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:-7])


@pytest.mark.parametrize("peft", [False, True], ids=["weights", "lora"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (missing, "tiny lack model.norm.weight of the LlamaForCausalLM"),
        (misshapen, "tiny have another shape for model.norm.weight of the LlamaForCausalLM"),
        (damaged, "tiny cannot be read"),
    ],
)
def test_weights_that_are_not_whole_are_refused(harm, message, peft, folder):
    harm(folder)
    config = args(folder, model_init_kwargs={"dtype": "float32"})
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if peft else None
    with pytest.raises(ValueError, match=message):
        RopeSFTTrainer(str(folder), config, train_dataset=rows(), peft_config=lora)
    assert config.model_init_kwargs == {"dtype": "float32"}, "as it was given"


@pytest.mark.parametrize("given", [None, {"dtype": "bfloat16"}, {"dtype": torch.float32}, {"dtype": "auto"}])
def test_whole_weights_are_loaded_as_by_trl(given, folder):
    config = args(folder, model_init_kwargs=given)
    ours = RopeSFTTrainer(str(folder), config, train_dataset=rows())
    plain = SFTTrainer(str(folder), args(folder, model_init_kwargs=given), train_dataset=rows())
    assert type(ours.model) is type(plain.model) and ours.model.dtype == plain.model.dtype
    theirs = plain.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.model.state_dict().items())
    assert config.model_init_kwargs == given and ours.args.model_init_kwargs == given


def test_what_the_user_asks_transformers_for_is_left_to_it(folder, monkeypatch):
    misshapen(folder)
    asked = {"ignore_mismatched_sizes": True, "dtype": "float32"}
    trainer = RopeSFTTrainer(str(folder), args(folder, model_init_kwargs=asked), train_dataset=rows())
    assert trainer.model.model.norm.weight.shape != (3,)
    missing(folder)
    monkeypatch.setattr(module, "is_deepspeed_zero3_enabled", lambda: True)
    RopeSFTTrainer(str(folder), args(folder), train_dataset=rows())


def test_too_little_memory_is_told_as_it_is(folder, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "create_model_from_path", full)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        RopeSFTTrainer(str(folder), args(folder), train_dataset=rows())
