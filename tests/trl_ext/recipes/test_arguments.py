"""Flags have hyphens, and `~` is the user's home where no shell expands it: after `--FLAG=`, in quotes, in recipes."""

import os

import pytest
import yaml
from support.tiny import tiny

from trl_ext import RecipeParser
from trl_ext.cli import main
from trl_ext.recipes.arguments import normalized
from trl_ext.recipes.stages import FIELDS


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("~/x", "{home}/x"),
        ("--output=~/x", "--output={home}/x"),
        ("--output_dir=a_b", "--output-dir=a_b"),
        ("--max_steps", "--max-steps"),
        *((same, same) for same in ("./~/x", "~", "~someone/x", "org/a_model", "--cue=about ~/x", "a/b=~/x", "-1", "")),
    ],
)
def test_arguments_have_one_form(typed, meant, home):
    assert normalized([typed]) == [meant.replace("{home}", str(home))]


def test_export_writes_into_the_home(home):
    tiny().save_pretrained(home / "model")
    assert main(["export", "~/model@ntk:factor=8", "--output=~/out", "--no-check"]) == 0
    assert (home / "out" / "config.json").is_file() and os.listdir() == []


def test_a_recipe_and_its_files_may_be_in_the_home(home):
    files = {"path": "json", "data_files": ["~/a.jsonl"]}
    recipe = {"output_dir": "~/out", "datasets": [files], "use_cpu": True, "bf16": False}
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    flags = ["--model_name_or_path=~/model", "--resume-from-checkpoint", "~/out/checkpoint-1"]
    _, training, model, data = RecipeParser(FIELDS).parse_args_and_config(["--config=~/recipe.yaml", *flags])
    assert training.output_dir == f"{home}/out" and model.model_name_or_path == f"{home}/model"
    assert training.resume_from_checkpoint == f"{home}/out/checkpoint-1"
    assert data.datasets[0].data_files == [f"{home}/a.jsonl"]
