"""The base of an adapter is of the revision that the adapter names: weights, config, tokenizer and chat template."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.characters import character_tokenizer
from support.hub import publish, use_cache
from support.tiny import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rope_patch import export, load_adapter, patch_model
from trl_ext import RopeSFTConfig, RopeSFTTrainer
from trl_ext.cli.model_spec import ModelSpec

LORA = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def written_by(name, seed):
    """A function that writes a base model whose every file tells its revision."""

    def write(folder):
        torch.manual_seed(seed)
        model = tiny(window=64 * seed)
        model.generation_config = GenerationConfig(max_new_tokens=seed)
        model.save_pretrained(folder)
        tokenizer = character_tokenizer()
        tokenizer.add_tokens([name])
        tokenizer.chat_template = f"{{# {name} #}}{{{{ messages[0]['content'] }}}}"
        tokenizer.save_pretrained(folder)

    return write


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """The folder of one that was trained on revision v1 of a base that has changed since."""
    use_cache(monkeypatch, tmp_path / "hub")
    publish(tmp_path / "hub", "owner/base", v1=written_by("one", 1), main=written_by("two", 2))
    base = AutoModelForCausalLM.from_pretrained("owner/base", revision="v1")
    model = patch_model(get_peft_model(base, LoraConfig(**LORA), revision="v1"), "yarn", factor=2.0)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def is_of_v1(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    return "one" in tokenizer.get_vocab() and "one" in tokenizer.chat_template and generation["max_new_tokens"] == 1


def test_export_of_a_folder(adapter, tmp_path):
    export(adapter, tmp_path / "out", check=False)
    assert is_of_v1(tmp_path / "out")


def test_export_of_a_model_in_memory(adapter, tmp_path):
    base = AutoModelForCausalLM.from_pretrained("owner/base", revision="v1")
    export(load_adapter(base, adapter), tmp_path / "out", check=False)
    assert is_of_v1(tmp_path / "out")


def test_a_model_of_the_command_line(adapter):
    spec = ModelSpec.parse(str(adapter))
    assert spec.trained_window() == 64
    assert "one" in spec.load_tokenizer().get_vocab()
    assert spec.load("cpu", "auto").config.max_position_embeddings == 128, "64 positions, twice"


def test_new_adapters_of_a_trainer_record_it_and_their_card_loads_it(adapter, tmp_path):
    peft_config = LoraConfig(**LORA)
    args = RopeSFTConfig(
        output_dir=str(tmp_path / "run"), model_init_kwargs={"revision": "v1"}, max_length=32, report_to="none",
        use_cpu=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [list(range(4, 20))]})
    trainer = RopeSFTTrainer("owner/base", args, train_dataset=rows, peft_config=peft_config)
    trainer.save_model()
    trainer.create_model_card()
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["revision"] == "v1"
    assert 'from_pretrained("owner/base", dtype="auto", revision="v1")' in (tmp_path / "run/README.md").read_text()
    assert peft_config.revision is None, "the user's own config is for any base"
