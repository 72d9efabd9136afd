"""A folder with tiny models and a text that they can be extended on."""

import json
import shutil

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import gemma3, tiny
from transformers import AutoModelForCausalLM

WINDOW = 800
TEXT = "It was a dark night. The wind blew! Who was there? "


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Models "base" (Llama) and "sliding" (Gemma 3), which end what they write, and documents; no test writes here."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    models = {
        "base": tiny(vocab_size=CHARACTERS, max_position_embeddings=WINDOW, dtype=torch.bfloat16),
        "sliding": gemma3(CHARACTERS, WINDOW),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        character_tokenizer().save_pretrained(folder / name)
    lines = [json.dumps({"text": f"Book {k}. " + TEXT * 200}) for k in range(20)]
    (folder / "books.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "short.jsonl").write_text(json.dumps({"text": "short"}) + "\n")
    (folder / "other.jsonl").write_text(json.dumps({"body": "short"}) + "\n")
    return folder


@pytest.fixture
def folder(inputs, tmp_path, monkeypatch):
    """A copy of `inputs`, where one is."""
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch):
    """Each plan measures the machine; nothing here reads how fast it is."""
    monkeypatch.setattr("trl_ext.extension.machine._SECONDS", 0.0)


@pytest.fixture
def weights():
    """A function that gives the weights of a checkpoint."""
    return lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
