"""`rope-patch train`: which recipe is run how, from what is typed to what is saved."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
import yaml
from support.tiny import tiny
from support.training import tokenizer
from transformers import AutoModelForCausalLM

from trl_ext import RopeSFTTrainer, cli, fine_tune_recipe, restore_recipe
from trl_ext.cli.train import MAIN_FIELDS, RESTORES, is_restoration


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a model, a text and a recipe of each kind."""
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    rows = [{"text": " ".join(f"w{3 + (i * j) % 97}" for j in range(100))} for i in range(1, 9)]
    (tmp_path / "books.jsonl").write_text("\n".join(map(json.dumps, rows)))
    short = {"max_steps": 1, "max_length": 32, "use_cpu": True, "bf16": False, "report_to": "none"}
    tuning = {"view": "skip", "view_args": {"max_skip": 32}, **short}
    text = [{"path": "json", "data_files": "books.jsonl"}]
    recipe = {"model_name_or_path": "model", "output_dir": "tuned", "datasets": text, **tuning}
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(recipe))
    stages = {"distil": short, "skip_extension": True, "text": ["books.jsonl"]}
    recipe = {"model_name_or_path": "model", "output_dir": "restored", "rescale": "pi", **stages}
    (tmp_path / "restore.yaml").write_text(yaml.safe_dump({**recipe, "rescale_args": {"factor": 2.0}}))
    return tmp_path


def test_a_recipe_is_trained_and_flags_win(folder, capsys):
    assert cli.main(["train", "tune.yaml", "--output_dir", "elsewhere", "--view_args", '{"max_skip": 9}']) == 0
    assert "max_skip=9" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(folder / "elsewhere").config.model_type == "llama"
    assert not (folder / "tuned").exists()


def test_a_recipe_with_keys_of_a_restoration_is_restored(folder, capsys):
    assert cli.main(["train", "--config", "restore.yaml"]) == 0
    assert "restored/model: " in capsys.readouterr().out
    saved = AutoModelForCausalLM.from_pretrained(folder / "restored" / "model")
    assert saved.config.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(("recipe", "output"), [("tune.yaml", "tuned"), ("restore.yaml", "restored")])
def test_a_folder_in_which_another_process_trains_is_refused(recipe, output, folder, monkeypatch, capsys):
    """A run that seems to hang, or whose terminal was lost, is easily started again beside itself."""

    def again(*_, **__):
        assert cli.main(["train", recipe]) == 2  # a lock is of an open file, so that one process can stand for two
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RopeSFTTrainer, "train", again)
        assert cli.main(["train", recipe]) == 130
    said = f"{output} is in use: another process writes there. Wait for it, stop it, or use another output_dir."
    assert said in capsys.readouterr().err
    assert cli.main(["train", recipe]) == 0


@pytest.mark.slow
def test_accelerate_launches_the_command(folder):
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "-m", "trl_ext"]
    done = subprocess.run([sys.executable, "-m", *launch, "train", "tune.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "tuned" / "config.json").is_file()


def test_a_restoration_is_known_by_its_keys_and_flags(folder):
    assert is_restoration(["--config", "restore.yaml"])
    assert not is_restoration(["--config", "tune.yaml"])
    assert is_restoration(["--rescale", "pi", "--text", "books.jsonl"])
    assert is_restoration(["--skip-extension", "--text=books.jsonl"])
    assert not is_restoration(["--view", "skip"])


def names(kinds):
    return {f.name for kind in kinds for f in fields(kind)}


def test_keys_of_a_restoration_are_those_that_a_fine_tuning_does_not_have():
    assert names(restore_recipe.FIELDS) - names(fine_tune_recipe.FIELDS) == set(RESTORES)


def test_the_help_names_fields_that_there_are(capsys):
    assert set(MAIN_FIELDS) <= names(fine_tune_recipe.FIELDS)
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in MAIN_FIELDS)


@pytest.mark.parametrize(("typed", "field"), [([], "view_args"), (["restore.yaml"], "skip_extension")])
def test_every_field_is_explained_on_request(typed, field, folder, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", *typed, "--help-all"])
    assert not end.value.code and f"--{field}" in capsys.readouterr().out
