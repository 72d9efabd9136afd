"""The user's home where no shell has put it: behind `--FLAG=`, within quotation marks, in recipes."""

import os

import pytest
import yaml
from support.characters import character_tokenizer
from support.tiny import tiny

from trl_ext import RecipeParser
from trl_ext.cli import main
from trl_ext.recipes.home import with_home
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
        ({"datasets": [{"data_files": ["~/a.jsonl"]}]}, {"datasets": [{"data_files": ["{home}/a.jsonl"]}]}),
    ],
)
def test_a_leading_tilde_is_the_home(typed, meant, home):
    def filled(value):
        if isinstance(value, str):
            return value.replace("{home}", str(home))
        many = isinstance(value, list)
        return [filled(item) for item in value] if many else {name: filled(item) for name, item in value.items()}

    assert with_home(typed) == filled(meant)


@pytest.mark.parametrize(
    "text", ["./~/x", "a/~/x", "~", "~someone/x", "org/model", "--cue=about ~/x", "a/b=~/x", 3, None, ""]
)
def test_all_else_stays(text, home):
    assert with_home(text) == text


def test_export_writes_into_the_home(home):
    tiny().save_pretrained(home / "model")
    assert main(["export", "~/model@ntk:factor=8", "--output=~/out", "--no-check"]) == 0
    assert (home / "out" / "config.json").is_file() and os.listdir() == []


def test_a_recipe_and_what_it_names_may_lie_in_the_home(home):
    def parsed(recipe, *flags):
        (home / "recipe.yaml").write_text(yaml.safe_dump({"output_dir": "~/out", **recipe}))
        return RecipeParser(FIELDS).parse_args_and_config(["--config=~/recipe.yaml", *flags])

    files = {"path": "json", "data_files": ["~/a.jsonl"]}
    on_cpu = {"use_cpu": True, "bf16": False}
    flags = ["--model_name_or_path=~/model", "--resume_from_checkpoint", "~/out/checkpoint-1"]
    _, training, model, data = parsed({"datasets": [files], **on_cpu}, *flags)
    assert training.output_dir == f"{home}/out" and model.model_name_or_path == f"{home}/model"
    assert training.resume_from_checkpoint == f"{home}/out/checkpoint-1"
    assert data.datasets[0].data_files == [f"{home}/a.jsonl"]


def test_a_plan_and_its_config_may_be_named_by_the_home(home, capsys):
    for saved in (tiny(), character_tokenizer()):
        saved.save_pretrained(home / "model")
    recipe = {"model_name_or_path": "~/model", "output_dir": "~/out", "max_length": 32, "report_to": "none"}
    (home / "tune.yaml").write_text(yaml.safe_dump({**recipe, "datasets": [{"path": "json"}]}))
    (home / "two.yaml").write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2}))
    assert main(["train", "~/tune.yaml", "--accelerate_config=~/two.yaml", "--dry_run"]) == 0
    assert "2 GPUs ddp" in capsys.readouterr().out
