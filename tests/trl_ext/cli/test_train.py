"""`rope-patch train`: which recipe is run how, from what is typed to what is saved."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.hub import move, publish, use_cache
from support.tiny import tiny
from support.training import tokenizer
from transformers import AutoModelForCausalLM

from rope_patch.export.writing import ShardWriter
from rope_patch.model_card import read_runs
from trl_ext import RopeSFTTrainer, cli
from trl_ext.cli.train import MAIN_FIELDS
from trl_ext.recipes import fine_tuning
from trl_ext.recipes.stages import FIELDS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a model, a text and a recipe of each kind."""
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    rows = [{"text": " ".join(f"w{3 + (i * j) % 97}" for j in range(100))} for i in range(1, 9)]
    (tmp_path / "books.jsonl").write_text("\n".join(map(json.dumps, rows)))
    short = {"max_steps": 1, "max_length": 32, "use_cpu": True, "bf16": False, "report_to": "none"}
    tuning = {"view": "skip", "view_args": {"skip": {"law": "uniform", "high": 32}}, **short}
    text = [{"path": "json", "data_files": "books.jsonl"}]
    recipe = {"model_name_or_path": "model", "output_dir": "tuned", "datasets": text, **tuning}
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(recipe))
    staged = {**recipe, "output_dir": "staged", "rescale": "pi", "rescale_args": {"factor": 2.0}}
    (tmp_path / "staged.yaml").write_text(yaml.safe_dump({**staged, "stages": [{"name": "first"}]}))
    return tmp_path


def test_a_recipe_is_trained_and_flags_win(folder, capsys):
    view_args = '{"skip": {"law": "uniform", "high": 9}}'
    command = ["train", "tune.yaml", "--output-dir", "elsewhere", "--view_args", view_args]  # in both spellings
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "high=9" in printed and "Nothing was left" not in printed
    assert AutoModelForCausalLM.from_pretrained(folder / "elsewhere").config.model_type == "llama"
    assert not (folder / "tuned").exists()
    assert cli.main([*command, "--resume-from-checkpoint", "elsewhere/checkpoint-1"]) == 0
    said = "Nothing was left to train: elsewhere/checkpoint-1 is of step 1, and the run ends at step 1.\n"
    assert capsys.readouterr().out.count(said) == 1


def test_a_value_that_a_library_refuses_is_told_with_its_flag(folder, capsys):
    assert cli.main(["train", "tune.yaml", "--learning-rate", "-1"]) == 2
    assert "rope-patch train: --learning-rate: " in capsys.readouterr().err


def test_a_recipe_with_stages_prints_its_result(folder, capsys, caplog):
    command = ["train", "--config", "staged.yaml", "--seed", "3", "--logging-steps", "1"]
    assert cli.main(command) == 0
    result = (
        r"staged/model: [\d,]+ tokens\n  first: 1 steps, loss [\d.]+ at the end\n"
        r"Serve it with transformers: python -c '.*staged/model.*'\n"
    )
    assert re.search(result, capsys.readouterr().out) and "nothing was left" not in caplog.text
    saved = AutoModelForCausalLM.from_pretrained(folder / "staged" / "model")
    assert saved.config.rope_parameters["factor"] == 2.0
    assert json.loads((folder / "staged/recipe.json").read_text())["stage first"]["seed"] == 3
    assert cli.main(command) == 0
    assert re.search(result, capsys.readouterr().out)
    assert caplog.text.count("All stages in staged are finished: nothing was left to do.\n") == 1


def test_ctrl_c_says_how_the_run_is_resumed(folder, monkeypatch, capsys):
    def stopped(trainer, *_):
        if trainer.state.global_step == stop_at:
            raise KeyboardInterrupt
        return step(trainer, *_)

    step = RopeSFTTrainer.training_step
    monkeypatch.setattr(RopeSFTTrainer, "training_step", stopped)
    command = ["train", "tune.yaml", "--max-steps", "3", "--save-steps", "1"]
    stop_at = 2
    assert cli.main(command) == 130
    resumes = "resumes with --resume-from-checkpoint tuned/checkpoint-2, and without it begins anew.\n"
    assert f"Stopped. The same command {resumes}" in capsys.readouterr().err
    stop_at = 0
    assert cli.main(command) == 130  # whose folder has checkpoints of the run before
    assert "Stopped. No checkpoint was saved: the same command begins anew.\n" in capsys.readouterr().err
    assert cli.main(["train", "staged.yaml"]) == 130
    assert "last checkpoint are kept: the same command resumes in staged.\n" in capsys.readouterr().err


def test_a_folder_in_which_another_process_trains_is_refused(folder, monkeypatch, capsys):
    """A run that seems to hang, or whose terminal was lost, is easily started again beside itself."""

    def again(*_, **__):
        assert cli.main(["train", "tune.yaml"]) == 2  # a lock is of an open file, so that one process can stand for two
        raise KeyboardInterrupt

    monkeypatch.setattr(RopeSFTTrainer, "train", again)
    for _ in range(2):
        assert cli.main(["train", "tune.yaml"]) == 130, "the lock ends with the run"
        said = "tuned is in use: another process writes there. Wait for it, stop it, or use another output_dir."
        assert said in capsys.readouterr().err


def test_after_a_full_disk_the_same_command_resumes(folder, monkeypatch, capsys):
    command = "train staged.yaml --max-steps 2 --save-steps 1".split()
    save = RopeSFTTrainer._save_optimizer_and_scheduler

    def save_first(self, folder):
        if self.state.global_step == 2:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
        save(self, folder)

    full = Mock(side_effect=OSError(28, "No space left on device"))
    for owner, name, replacement, unwritten, advice in (
        (
            RopeSFTTrainer,
            "_save_optimizer_and_scheduler",
            save_first,
            "first/checkpoint-2",
            "staged/first/checkpoint-1,",
        ),
        (ShardWriter, "finish", full, "model", "Free some space, and run the same again."),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            assert cli.main(command) == 2
        (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("rope-patch train: "))
        assert said.startswith(f"rope-patch train: staged/{unwritten} could not be written, on a disk with ")
        assert advice in said
    assert cli.main(command) == 0
    assert AutoModelForCausalLM.from_pretrained(folder / "staged/model")


@pytest.fixture
def hub(folder, monkeypatch):
    """A hub with "owner/base", whose branches main and dev are the folder "model", and later has other weights."""

    def write(to):
        shutil.copytree(folder / "model", to, dirs_exist_ok=True)

    def write_later(to):
        write(to)
        model = AutoModelForCausalLM.from_pretrained(to)
        model.lm_head.weight.data += torch.randn(model.lm_head.weight.shape)
        model.save_pretrained(to)

    use_cache(monkeypatch, folder / "hub")
    publish(folder / "hub", "owner/base", main=write, dev=write, later=write_later)
    return folder / "hub"


OF_HUB = "train tune.yaml --model-name-or-path owner/base --save-steps 1".split()
WITH_ADAPTERS = "--use-peft true --lora-target-modules q_proj v_proj --lora-r 2 --learning-rate 0.1".split()


@pytest.mark.parametrize("branch", [pytest.param("main", marks=pytest.mark.slow), "dev"])
def test_a_branch_is_the_commit_that_it_was_when_the_run_was_begun(branch, folder, hub):
    """Also if it is gone since, and of adapters, which hold nothing of the weights below them."""
    command = [*OF_HUB, *WITH_ADAPTERS, "--max-steps", "2", "--model-revision", branch, "--output-dir"]
    assert cli.main([*command, "whole"]) == 0
    shutil.copytree("whole/checkpoint-1", "parts/checkpoint-1")
    commit = move(hub, "owner/base", branch, to="later")
    if branch == "dev":
        (hub / "models--owner--base/refs/dev").unlink()
    assert cli.main([*command, "parts", "--resume-from-checkpoint", "parts/checkpoint-1"]) == 0
    for run in ("whole", "parts", "parts/checkpoint-2"):
        assert json.loads((folder / run / "adapter_config.json").read_text())["revision"] == commit
        assert f"at revision `{commit}`, trained" in (folder / run / "README.md").read_text()
    one, other = (load_file(f"{run}/adapter_model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_of_another_commit_is_not_resumed(folder, hub, capsys, monkeypatch):
    def command(revision):
        return [*OF_HUB, "--max-steps", "1", "--model-init-kwargs", json.dumps({"revision": revision})]

    assert cli.main(command("dev")) == 0
    commits = {name: (hub / "models--owner--base/refs" / name).read_text() for name in ("dev", "later")}
    (run,) = read_runs(folder / "tuned")
    recorded = {"model": "owner/base", "model_revision": "dev", "model_commit": commits["dev"]}
    assert run["run"]["hub_model"] == recorded
    capsys.readouterr()
    resumed = ["--resume-from-checkpoint", "tuned/checkpoint-1"]
    monkeypatch.setattr(fine_tuning, "_train", lambda *_: pytest.fail("trained"))
    assert cli.main([*command("later"), *resumed]) == 2
    assert (
        f"model_revision must be dev, with which tuned/checkpoint-1 was begun as commit {commits['dev']} of "
        f"owner/base, got later, which is commit {commits['later']}. Give the former, or start a new run, in another "
        "output_dir and without resume_from_checkpoint."
    ) in capsys.readouterr().err
    with pytest.raises(pytest.fail.Exception, match="trained"):  # the same by its commit
        cli.main([*OF_HUB, "--max-steps", "1", "--model-revision", commits["dev"], *resumed])


@pytest.mark.slow
def test_accelerate_launches_the_command(folder):
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "-m", "trl_ext"]
    done = subprocess.run([sys.executable, "-m", *launch, "train", "tune.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "tuned" / "config.json").is_file()


@pytest.mark.parametrize(("recipe", "output"), [("tune.yaml", "tuned"), ("staged.yaml", "staged")])
def test_a_refused_recipe_leaves_no_folder(recipe, output, folder, capsys):
    assert cli.main(["train", recipe, "--model-revision", "v2"]) == 2
    assert "model_revision v2 is of a model on the hub, and model is a folder: leave it out" in capsys.readouterr().err
    (folder / "books.jsonl").unlink()
    assert cli.main(["train", recipe]) == 2
    assert "books.jsonl cannot be read" in capsys.readouterr().err
    assert not (folder / output).exists()


def test_the_help_names_fields_that_there_are(capsys):
    assert set(MAIN_FIELDS) - {"stages"} <= {f.name for kind in FIELDS for f in fields(kind)}
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in MAIN_FIELDS)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help-all"])
    assert not end.value.code and "--view-args" in capsys.readouterr().out
