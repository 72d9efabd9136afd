"""Tokens that were added for a training, a new end of text and an edited chat template go where the adapter goes."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.characters import character_tokenizer
from support.tiny import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl import SFTConfig, SFTTrainer

import rope_patch
from rope_patch import load_adapter, patch_model
from trl_ext.cli.model_spec import ModelSpec

BASE_ROWS = 127  # the tokens of the tokenizer before
LORA = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
ADDED = {"trainable_token_indices": {"embed_tokens": [127, 128]}}
IDS = torch.tensor([[5, 127, 90, 128, 17, 33, 126, 8]])


def export(model, folder, **options):
    return rope_patch.export(model, folder, **{"check": False, **options})


def base_in(folder, tied=False, rows=BASE_ROWS):
    if not folder.exists():
        tiny(vocab_size=rows, tie_word_embeddings=tied).save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def larger_tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<call>", "</call>"], special_tokens=True)
    tokenizer.chat_template = "{{ messages[0]['content'] }}</call>"
    return tokenizer


def trained(folder, model, rows, *, rescaled=True, save=None, **options):
    """An adapter that was trained on `model` with more tokens, and saved with its tokenizer."""
    model.resize_token_embeddings(rows, mean_resizing=False)
    if rescaled:
        patch_model(model, "ntk", factor=2.0)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**{**LORA, **options})).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter += parameter.requires_grad * 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(folder, **(save or {}))
    larger_tokenizer().save_pretrained(folder)
    return adapted


KINDS = {
    "rows to a multiple of 8": {"rows": 136, **BOTH},
    "fewer rows than the base, in a pickle": {
        "rows": 129,
        "base_rows": 160,
        "save": {"safe_serialization": False},
        **BOTH,
    },
    "frozen, saved by PEFT itself": {"rows": 129},
    "tied, added tokens alone": {"rows": 129, "tied": True, **ADDED},
    "as TRL adds them": {"rows": 136, "modules_to_save": ["lm_head"], **ADDED},
    "LoRA on both ends": {"rows": 129, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_adapter_with_added_tokens_is_exported_with_them(kind, tmp_path):
    options = dict(KINDS[kind])
    made = {"tied": options.pop("tied", False), "rows": options.pop("base_rows", BASE_ROWS)}
    right = trained(tmp_path / "adapter", base_in(tmp_path / "base", **made), **options)(IDS).logits
    export(tmp_path / "adapter", tmp_path / "of_folder")
    loaded = load_adapter(base_in(tmp_path / "base"), tmp_path / "adapter").eval()
    export(loaded, tmp_path / "of_model")
    folders = ["of_folder", "of_model"]
    if kind == "as TRL adds them":
        export(ModelSpec.parse(str(tmp_path / "adapter")).load("cpu", "auto"), tmp_path / "of_spec")
        export(loaded.merge_and_unload(), tmp_path / "of_merged")
        folders += ["of_spec", "of_merged"]
    for folder in folders:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(again(IDS).logits, right, rtol=1e-4, atol=1e-4)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert tokenizer("a<call>b</call>")["input_ids"] == [97, 127, 98, 128]
        assert tokenizer.chat_template == larger_tokenizer().chat_template


@torch.no_grad()
def test_an_adapter_without_a_rescaling_too(tmp_path):
    right = trained(tmp_path / "adapter", base_in(tmp_path / "base"), 136, rescaled=False, **BOTH)(IDS).logits
    export(tmp_path / "adapter", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again(IDS).logits, right, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("</call>")["input_ids"] == [128]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "holds those of lm_head without those of model.embed_tokens"),
        ({}, "has tokens up to ID 128, the base model has 127 rows of embeddings"),
    ],
    ids=["one end", "none"],
)
def test_rows_that_no_file_has_are_not_drawn_at_random(options, message, tmp_path):
    save = {"save_embedding_layers": False}
    trained(tmp_path / "adapter", base_in(tmp_path / "base"), 129, save=save, **options)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        load_adapter(base_in(tmp_path / "base"), tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


def test_a_model_with_added_tokens_does_not_get_the_tokenizer_from_before(tmp_path):
    model = base_in(tmp_path / "base")
    model.resize_token_embeddings(129)
    with pytest.raises(ValueError, match="model has embeddings of 129 tokens, and the checkpoint in .*base.* has 127"):
        export(model, tmp_path / "out")
    export(model, tmp_path / "out", tokenizer=tmp_path / "base")


@pytest.mark.slow
@torch.no_grad()
def test_a_checkpoint_of_plain_trl_ends_its_texts_as_it_was_trained_to(tmp_path):
    """The oracle is the model that TRL trained, merged by PEFT and saved by Transformers."""
    model = patch_model(base_in(tmp_path / "base", rows=140), "ntk", factor=2.0)
    args = SFTConfig(
        output_dir=str(tmp_path / "run"), max_steps=1, use_cpu=True, bf16=False, report_to=[], max_length=16,
        eos_token="</call>", disable_tqdm=True,
    )  # fmt: skip
    with torch.enable_grad():
        trainer = SFTTrainer(
            model, args, train_dataset=Dataset.from_dict({"text": ["a text", "another"]}),
            processing_class=larger_tokenizer(), peft_config=LoraConfig(**LORA),
        )  # fmt: skip
        trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    GenerationConfig(eos_token_id=[128, 2], top_k=7, do_sample=True).save_pretrained(checkpoint)
    export(checkpoint, tmp_path / "of_folder")
    export(load_adapter(base_in(tmp_path / "base"), checkpoint), tmp_path / "of_model")
    right = copy.deepcopy(trainer.model.eval()).merge_and_unload()
    right.save_pretrained(tmp_path / "right")
    saved = json.loads((tmp_path / "right" / "config.json").read_text())
    assert saved["eos_token_id"] == 128
    for folder in ("of_folder", "of_model"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert [config[key] for key in ("eos_token_id", "pad_token_id")] == [
            saved["eos_token_id"],
            saved["pad_token_id"],
        ]
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert again.generation_config.eos_token_id == right.generation_config.eos_token_id
        assert again.generation_config.top_k == 7
        torch.testing.assert_close(again(IDS).logits, right(IDS).logits, rtol=1e-4, atol=1e-4)
        assert AutoTokenizer.from_pretrained(tmp_path / folder).eos_token == "</call>"


def test_an_adapters_folder_is_found_from_elsewhere_and_missed_where_it_is_gone(tmp_path, monkeypatch, caplog):
    trained(tmp_path / "adapter", base_in(tmp_path / "base", rows=140), 140)
    monkeypatch.chdir(tmp_path)
    model = load_adapter(base_in(tmp_path / "base"), "adapter")
    monkeypatch.chdir("/")
    export(model, tmp_path / "out")
    assert "</call>" in AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() and "is gone" not in caplog.text
    (tmp_path / "adapter").rename(tmp_path / "moved")
    export(model, tmp_path / "again")
    assert "adapter, from which an adapter was loaded, is gone: files of the base model are used" in caplog.text


def test_a_chat_template_alone_goes_with_the_tokenizer_of_the_base(tmp_path):
    model = get_peft_model(patch_model(base_in(tmp_path / "base"), "ntk", factor=2.0), LoraConfig(**LORA))
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("edited")
    export(tmp_path / "adapter", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == "edited" and tokenizer("a")["input_ids"] == [97]
