"""The one-line patch under a plain loop, Transformers' Trainer and trainers of TRL: each example runs as it stands."""

import math
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.trainer import Trainer

import rope_patch
from rope_patch.patch import view_source

FOLDER = Path(__file__).parents[2] / "examples" / "other_trainers"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in ("tiny_model.py", "start_patched.py"))
LOOPS = ("lightning_loop.py", "pytorch_loop.py")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs an example; gives its view, and what a trainer has logged."""

    def patch(model, *arguments, **options):
        patched = patch_model(model, *arguments, **options)
        seen["source"] = view_source(patched)
        return patched

    def log(trainer, logs, *arguments, **options):
        seen["log"].append(logs)
        return keep(trainer, logs, *arguments, **options)

    seen = {"log": []}
    patch_model, keep = rope_patch.patch_model, Trainer.log
    monkeypatch.setattr(rope_patch, "patch_model", patch)
    monkeypatch.setattr(Trainer, "log", log)
    monkeypatch.syspath_prepend(FOLDER)

    def example(script, *arguments):
        if script == "lightning_loop.py":
            pytest.importorskip("lightning")
        monkeypatch.setattr(sys, "argv", [script, "--output-dir", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(FOLDER / script), run_name="__main__")
        return end.value.code, seen.get("source"), seen["log"]

    return example


def test_every_trainer_of_the_page_has_its_example():
    assert SCRIPTS == [
        "lightning_loop.py", "pytorch_loop.py", "transformers_trainer.py", "trl_dpo.py", "trl_grpo.py", "trl_sft.py"
    ]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_trains_under_its_view_and_saves_a_plain_checkpoint(script, run, tmp_path, capsys):
    status, source, log = run(script)
    assert status == 0, capsys.readouterr().err
    drawn = source.last.parameters["skip"]
    assert source.view.name == "skip" and 1 <= drawn.min() and drawn.max() <= 4096
    if script not in LOOPS:
        losses = [entry["loss"] for entry in log if "loss" in entry]
        assert len(losses) == 2 and all(map(math.isfinite, losses))
        if script == "trl_dpo.py":  # where policy and reference drew apart it would be another
            assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    saved = tmp_path / "out"
    if (saved / "adapter_config.json").is_file():
        assert script == "trl_dpo.py"
    else:
        assert not AutoModelForCausalLM.from_pretrained(saved).config.rope_parameters.get("factor")


def test_a_model_of_the_user_is_trained(run, tmp_path):
    status, *_ = run("pytorch_loop.py")
    (tmp_path / "out").rename(tmp_path / "mine")
    assert status == 0
    assert run("pytorch_loop.py", "--model", str(tmp_path / "mine"), "--steps", "1")[0] == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_mistake_is_one_line(script, run, capsys):
    assert run(script, "--model", "./nowhere")[0] == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"{script}: ") and "there is no folder ./nowhere" in line


def test_no_two_examples_write_to_one_folder(run, monkeypatch):
    """What one leaves is refused by the next, as an adapter beside weights; README's `extend` writes to `out`."""
    from tiny_model import parse_arguments

    folders = set()
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [script])
        folders.add(parse_arguments("An example.").output_dir)
    assert len(folders) == len(SCRIPTS) and "out" not in folders


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_short(script):
    assert len((FOLDER / script).read_text().splitlines()) < 60
