"""A folder with tiny models and a text that they can be extended on."""

import json

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import gemma3, tiny
from transformers import AutoModelForCausalLM

WINDOW = 800
TEXT = "It was a dark night. The wind blew! Who was there? "


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With models "base" (Llama) and "sliding" (Gemma 3), which end what they write, and documents."""
    torch.manual_seed(0)
    models = {
        "base": tiny(vocab_size=CHARACTERS, max_position_embeddings=WINDOW),
        "sliding": gemma3(CHARACTERS, WINDOW),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        character_tokenizer().save_pretrained(tmp_path / name)
    lines = [json.dumps({"text": f"Book {k}. " + TEXT * 200}) for k in range(20)]
    (tmp_path / "books.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "short"}) + "\n")
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "short"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def weights():
    """A function that gives the weights of a checkpoint."""
    return lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
