"""Without an extra each command says in one line what to install. Imports are blocked in a Python of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

BLOCKED = """
import json, sys
packages, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(packages))
from trl_ext.cli import main
for command in commands:
    print(f"status {main(command)}", file=sys.stderr, flush=True)
"""
RECIPE = {
    "model_name_or_path": "model",
    "output_dir": "out",
    "datasets": [{"path": "json", "data_files": "books.jsonl"}],
    "max_length": 32,
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
}
EXTEND = ["extend", "model", "--to", "512", "--data", "books.jsonl", "--output", "out"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny(vocab_size=CHARACTERS).save_pretrained("model")
    character_tokenizer().save_pretrained("model")
    (tmp_path / "books.jsonl").write_text((json.dumps({"text": "It was a dark night. " * 40}) + "\n") * 20)
    return tmp_path


def told(packages, commands):
    """What each command says, with its status."""
    run = [sys.executable, "-c", BLOCKED, json.dumps([packages, commands])]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stderr.replace("\r", "\n").splitlines()
    said = [line for line in lines if line.startswith(("rope-patch", "status"))]
    return list(zip(said[::2], said[1::2], strict=True))


@pytest.mark.slow
def test_without_trl_its_commands_name_the_extra(folder):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    commands = [["train", "recipe.yaml"], EXTEND, ["demo", "--output", "demo"]]
    for command, (said, status) in zip(commands, told(["trl", "datasets", "peft"], commands), strict=True):
        assert status == "status 2" and said.startswith(f"rope-patch {command[0]}: ")
        assert "pip install 'rope-patch[demo]'" in said or "pip install 'rope-patch[trl]'" in said


@pytest.mark.slow  # told by the tests of user_errors too; these are the words of the packages that are installed
def test_other_extras_are_named_where_they_are_asked_for(folder):
    changes = {
        "peft": {"use_peft": True},
        "bits": {"use_peft": True, "load_in_4bit": True},
        "flash": {"attn_implementation": "flash_attention_2"},
        "wandb": {"report_to": "wandb"},
        "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    }
    for name, change in changes.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**RECIPE, **change}))
    small = ["--rows", "2", "--shares", "text=1", "--short", "0", "--prompts", "1", "--lengths", "256"]
    evaluate = ["eval", "--model", "model", "--text", "books.jsonl", "--length", "512"]
    commands = {
        ("train", "peft.yaml"): "peft",
        ("train", "bits.yaml"): "pip install",
        ("train", "flash.yaml"): "rope-patch[flash]",
        ("train", "wandb.yaml"): "pip install wandb",
        ("train", "deepspeed.yaml"): "rope-patch[deepspeed]",
        (*EXTEND, *small, "--train", "lora"): "rope-patch[peft]",
        (*EXTEND, *small): "rope-patch[plots]",
        (*evaluate,): "rope-patch[plots]",
        (
            "probe",
            "--model",
            "model",
            "--text",
            "books.jsonl",
            "--length",
            "512",
            "--plot",
            "x.png",
        ): "rope-patch[plots]",
    }
    blocked = ["peft", "bitsandbytes", "flash_attn", "wandb", "deepspeed", "matplotlib"]
    if find_spec("deepspeed"):  # Transformers looks for an installed one, and takes a blocked import for a bug
        del commands["train", "deepspeed.yaml"]
    for named, (said, status) in zip(commands.values(), told(blocked, list(map(list, commands))), strict=True):
        assert status == "status 2" and "pip install" in said and named in said, said
