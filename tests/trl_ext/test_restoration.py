"""Two stages in one call, interrupted at every border, and what comes out of them."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from transformers import AutoModelForCausalLM

import trl_ext.restoration as module
from rope_patch import patch_model
from trl_ext import restore
from trl_ext.restoration import cut_into_rows

TEXT = "It was a dark night. The wind blew! Who was there? " * 20
SMALL = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "save_steps": 1, "use_cpu": True, "bf16": False,
    "report_to": [], "disable_tqdm": True, "learning_rate": 1e-3, "warmup_steps": 0,
}  # fmt: skip
STAGES = {"distil": {**SMALL, "max_steps": 3, "max_length": 60}, "extend": {**SMALL, "max_steps": 2, "max_length": 120}}
DOCUMENTS = Dataset.from_list([{"text": TEXT}, {"text": "short"}, {"text": TEXT[7:500]}])


@pytest.fixture
def folder(tmp_path):
    tiny(vocab_size=CHARACTERS).save_pretrained(tmp_path / "tiny")
    character_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path


def run(folder, name="out", peft=True, **options):
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM") if peft else None
    arguments = {"rescale": "pi", "rescale_args": {"factor": 4.0}, "dtype": "float32", "peft_config": config, **STAGES}
    return restore(folder / "tiny", DOCUMENTS, folder / name, **{**arguments, **options})


def logits(folder):
    ids = torch.arange(40, 110)[None]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(ids).logits


def test_rows_are_cut_from_each_document_on_its_own():
    tokenizer = character_tokenizer()
    rows = cut_into_rows(DOCUMENTS, tokenizer, 100)["input_ids"]
    assert len(rows) == len(TEXT) // 100 + 493 // 100 and {len(row) for row in rows} == {100}
    assert tokenizer.decode(rows[0]) == TEXT[:100] and tokenizer.decode(rows[len(TEXT) // 100]) == TEXT[7:107]
    with pytest.raises(ValueError, match="no document has 9000 tokens"):
        cut_into_rows(DOCUMENTS, tokenizer, 9000)
    with pytest.raises(ValueError, match="a column `text`, got a"):
        cut_into_rows(Dataset.from_list([{"a": "b"}]), tokenizer, 4)


@pytest.mark.parametrize("peft", [True, False], ids=["lora", "full"])
def test_the_result_is_a_plain_rescaled_checkpoint(folder, peft):
    found = run(folder, peft=peft)
    assert found.distil.tokens == 3 * 2 * 60 and found.extend.tokens == 2 * 2 * 120
    assert found.tokens == 360 + 480 and found.folder == folder / "out" / "model"
    config = json.loads((found.folder / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 4.0 and config["rope_parameters"]["rope_type"] == "linear"
    rescaled = patch_model(tiny(vocab_size=CHARACTERS), "pi", factor=4.0)
    with torch.no_grad():
        before = rescaled(torch.arange(40, 110)[None]).logits
    assert not torch.allclose(logits(found.folder), before), "it was trained"
    assert (found.folder / "tokenizer.json").is_file()


def test_an_interrupted_run_goes_on_to_the_same_result(folder, monkeypatch):
    whole = run(folder, "whole")
    step, calls, stop_at = module.RopeSFTTrainer.training_step, [], [2, 6]

    def stopping(self, *args, **kwargs):
        calls.append(self.args.max_steps)
        if len(calls) in stop_at:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(module.RopeSFTTrainer, "training_step", stopping)
    for _ in stop_at:  # within the first stage, then within the second
        with pytest.raises(KeyboardInterrupt):
            run(folder, "parts")
    found = run(folder, "parts")
    assert calls == [3, 3, 3, 3, 2, 2, 2], "no step that was saved is done again"
    assert torch.equal(logits(found.folder), logits(whole.folder))
    seconds = json.loads((folder / "parts" / "seconds.json").read_text())
    assert seconds == {"distil": found.distil.seconds, "extend": found.extend.seconds}, "of all parts of a stage"
    assert found.distil.loss == whole.distil.loss and found.extend.tokens == whole.extend.tokens
    calls.clear()
    assert run(folder, "parts") == found and not calls


def test_stage_two_starts_from_stage_one(folder):
    alone = run(folder, "alone", skip_extension=True)
    still = run(folder, "still", extend={**STAGES["extend"], "learning_rate": 0.0})
    assert alone.extend is None and not torch.equal(logits(alone.folder), logits(folder / "tiny"))
    torch.testing.assert_close(logits(still.folder), logits(alone.folder))


def test_another_run_in_the_folder_and_wrong_options_are_refused(folder):
    run(folder, skip_extension=True)
    with pytest.raises(ValueError, match="rescale_args {'factor': 4.0} there and {'factor': 2.0} here. Use another"):
        run(folder, skip_extension=True, rescale_args={"factor": 2.0})
    with pytest.raises(
        ValueError, match="Unknown field 'max_stepps' of distil, .* RopeSFTConfig. Did you mean 'max_steps'"
    ):
        run(folder, "other", distil={"max_stepps": 4})
    with pytest.raises(ValueError, match="Unknown rescaling 'pii'. Did you mean 'pi'"):
        run(folder, "other", rescale="pii")
    with pytest.raises(ValueError, match="rescale_args must be a dict such as .*, got 'factor=4'"):
        run(folder, "other", rescale_args="factor=4")
    with pytest.raises(
        ValueError, match="model must be a hub id or the folder of a checkpoint, .*got LlamaForCausalLM"
    ):
        restore(tiny(), None, folder / "other", rescale="pi", rescale_args={"factor": 2.0})
    with pytest.raises(ValueError, match="no document has 5000 tokens"):
        run(folder, "other", extend={**STAGES["extend"], "max_length": 5000})
    assert not (folder / "other").exists()


def test_parts_of_a_model_are_not_exported(folder, monkeypatch):
    monkeypatch.setattr("trl_ext.restoration.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="use ZeRO-2, or a RopeSFTTrainer for each stage"):
        run(folder, "other")
    assert not (folder / "other").exists()
