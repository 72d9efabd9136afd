"""docs/mistakes.md: each command of its tables is run, and what it says is what the page says."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support.characters import CHARACTERS, character_tokenizer
from support.own_code import save_with_own_code
from support.tiny import tiny
from transformers import GPT2Config, GPT2LMHeadModel

from trl_ext import cli

PAGE = (Path(__file__).parents[3] / "docs" / "mistakes.md").read_text()
RECIPE = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if "`rope-patch " in line and line[0] == "|"]
ROWS = [row if len(row) == 4 else [row[0].removesuffix(" |"), "", *row[1:]] for row in ROWS]
HINT = " (ROPE_PATCH_TRACEBACK=1 shows where this comes from.)"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("models")
    for name in ("model", "bare"):
        tiny(vocab_size=CHARACTERS).save_pretrained(folder / name)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=CHARACTERS, **shape)).save_pretrained(folder / "gpt2")
    base = tiny(vocab_size=CHARACTERS)
    base.name_or_path = "model"
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    save_with_own_code(folder / "own", vocab_size=CHARACTERS)
    for name in ("model", "gpt2", "own"):
        character_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    """As the page says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    for name in ("model", "bare", "gpt2", "own", "adapter"):
        (tmp_path / name).symlink_to(models / name)
    (tmp_path / "empty").mkdir()
    for name, column in (("books", "text"), ("pages", "content")):
        lines = [json.dumps({column: "It was a dark night. " * 9})] * 8
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "list.yaml").write_text("- view: skip\n")
    return tmp_path


def typed(folder, change, command):
    """Write the recipe of a row and run its command; the exit status."""
    recipe = RECIPE
    if change:
        right, wrong = re.fullmatch("`(.*)` → `(.*)`", change).groups()
        assert f"{right}\n" in recipe
        recipe = recipe.replace(f"{right}\n", f"{wrong}\n")
    (folder / "recipe.yaml").write_text(recipe)
    program, *arguments = shlex.split(command.strip("`"))
    assert program == "rope-patch"
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return end.code


def test_there_are_more_than_twenty():
    assert len(ROWS) > 20
    commands = {row[2].split()[1].strip("`") for row in ROWS}
    assert {"train", "eval", "rows", "export", "demo", "check", "probe", "methods"} <= commands


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_mistake_is_told_as_on_the_page(row, folder, capsys):
    _, change, command, wanted = row
    assert typed(folder, change, command) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rope-patch")]
    assert len(said) == 1, "one line"
    found = said[0].removesuffix(HINT)
    assert re.fullmatch(re.escape(wanted).replace(re.escape("..."), ".*"), found), found


def test_the_recipe_of_the_page_is_right(folder, capsys):
    assert typed(folder, "", "rope-patch train recipe.yaml") == 0
    assert "Skip(" in capsys.readouterr().out
