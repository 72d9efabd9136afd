"""Plans for GPUs that are not here: what they need, how long they take, what would make them fit."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scaling import extended_model, extension_plan
from support.characters import character_tokenizer
from support.ranks import ROOT
from support.shapes import size

from trl_ext import cli, extend
from trl_ext.extension import choices, duration, measuring, measuring_parts, rows
from trl_ext.extension.choices import choose
from trl_ext.extension.duration import H200, step_calls, step_operations
from trl_ext.extension.fitting import engine_of, fits
from trl_ext.extension.machine import GIB, Machine
from trl_ext.memory.step import Step
from trl_ext.recipes.launching import Launch

EXTENSIONS = json.loads((Path(__file__).parents[3] / "research" / "results" / "extension-memory-h200.json").read_text())
RUN = json.loads((Path(__file__).parents[3] / "research" / "results" / "extension-run-h200.json").read_text())
MODEL = replace(extended_model("Llama-3-8B"), tokenizer=character_tokenizer())  # its modules are made once


def plan_of(gib, n_gpus=1, **given):
    return extension_plan(MODEL, gib, n_gpus, **given)


def test_a_plan_for_another_gpu_chooses_and_counts_as_on_that_gpu():
    plan = plan_of(80)
    here = Machine("cuda", "a GPU", 80 * GIB, bf16=True)
    assert plan.choices == choose(MODEL, plan.options, here) and plan.fits
    assert plan.choices.weights.value["train"] == "lora" and plan.choices.precision.value == "bf16"
    (measured,) = (run["peak_gib"] for run in EXTENSIONS["runs"] if run["case"] == "llama-8b lora")
    assert plan.memory.total / GIB == pytest.approx(measured, rel=0.05)
    text = str(plan)
    assert "on a GPU of 80 that is not here" in text and "not in this" not in text
    assert "of H200s, by arithmetic at 470 TFLOP/s" in text and "timing" not in text
    assert "[measured by us on SmolLM2; " in text and "[measured; " not in text


def test_hours_elsewhere_are_those_of_an_h200():
    """The steps that were measured on one, each within a quarter; scaling.py has the same operations a second."""
    for run in EXTENSIONS["runs"]:
        shape = size(run["shape"])
        train = "lora" if run["train"] == "qlora" else run["train"]
        step = Step(train, 64, run["length"], True, run["checkpointing"], run["objective"] == "native-distill")
        seconds = H200.seconds(step_operations(shape, step, run["length"]), step_calls(shape, step))
        assert seconds == pytest.approx(run["seconds_a_row"], rel=0.25), run["case"]


def in_short(monkeypatch, model, n_gpus, ruler_tasks, **given):
    """The plan of a run that benchmarks/extension_run.py has shortened."""
    monkeypatch.setattr(choices, "_EVAL_ROWS", 1)
    monkeypatch.setattr(choices, "RULER_TASKS", choices.RULER_TASKS[:ruler_tasks])
    return extension_plan(model, 139.3, n_gpus, **given).minutes


def test_a_whole_run_on_two_gpus_takes_as_long_as_planned(monkeypatch):
    """Starting and loading are most of it, and saving twice takes longer than its two steps."""
    options = {**RUN["options"], "lengths": tuple(RUN["options"]["lengths"])}
    n_gpus, model = options.pop("devices"), replace(extended_model("Qwen3-8B"), tokenizer=character_tokenizer())
    planned = in_short(monkeypatch, model, n_gpus, RUN["ruler_tasks"], **options)
    before, _, train_and_export, after = (stage["seconds"] / 60 for stage in RUN["measured"]["stages"][1:])
    assert planned.measure == pytest.approx(before, rel=0.15) and planned.measure == pytest.approx(after, rel=0.15)
    assert planned.train + planned.export == pytest.approx(train_and_export, rel=0.15)
    assert planned.total == pytest.approx(before + train_and_export + after, rel=0.15)


def test_a_whole_run_on_one_gpu_takes_as_long_as_planned(monkeypatch):
    """30 s of measuring, 20 of training and 93 of an export on the host: research/results/speed.md."""
    monkeypatch.setattr(duration, "has_room", lambda checkpoint, memory: False)
    given = {"train": "qlora", "rows": 16, "row_length": 8192, "rows_per_step": 4, "short": 0.0, "prompts": 1}
    shares = {"text": 1.0, "questions": 1.0}
    planned = in_short(monkeypatch, MODEL, 1, 4, **given, shares=shares, lengths=(8192,))
    assert [60 * planned.measure, 60 * planned.export] == pytest.approx([30, 93], rel=0.15)
    assert 60 * (planned.measure + planned.train + planned.export) == pytest.approx(30 + 20 + 93, rel=0.15)


def test_several_gpus_divide_the_hours_and_each_holds_what_the_trainer_counts():
    one, eight = plan_of(80), plan_of(80, 8)
    assert eight.choices == one.choices and 0 < eight.minutes.train - one.minutes.train / 8 < 0.6, "they start and load"
    assert 4 < one.minutes.measure / eight.minutes.measure < 8, "of the longest prompts there are few parts"
    assert eight.engine.config == "ddp" and eight.engine.bytes == pytest.approx(one.memory.total, rel=0.05)
    assert "--accelerate-config ddp --num-processes 8 --gradient-accumulation-steps 1" in str(eight)


def test_all_weights_that_one_gpu_cannot_hold_are_split_over_eight():
    assert not plan_of(80, train="all").fits
    plan = plan_of(80, 8, train="all")
    assert plan.fits and plan.engine.config == "fsdp2" and plan.engine.bytes < 80 * GIB < plan.memory.total
    named = plan_of(80, 8, train="all", accelerate_config="zero2")
    assert named.engine.config == "zero2" and "under zero2, the engine that you name" in str(named)


def test_what_would_make_a_training_fit_is_said_and_does():
    given = {"train": "all", "gradient_checkpointing": False}
    plan = plan_of(80, **given)
    found = plan.remedies
    assert found[0] == "--train lora" and found[-1].startswith("one GPU of ")
    assert f"DOES NOT FIT: {plan.misfit}" in str(plan) and str(plan).endswith("\n".join(f"  {way}" for way in found))
    assert plan_of(80, **{**given, "train": "lora"}).fits
    assert plan_of(int(found[-1].split()[3]), **given).fits
    for way in found:
        if "--devices" in way:
            assert plan_of(80, int(way.split()[-1]), **given).fits
        if way.startswith("--row-length"):
            assert plan_of(80, row_length=int(way.split()[-1]), **given).fits
    assert plan_of(24, **given).remedies[0] == "--train lora --gradient-checkpointing", "both together"


def test_qlora_makes_a_training_fit_and_one_gpu_measures_all_weights():
    model = replace(extended_model("Qwen3-8B"), tokenizer=character_tokenizer())
    plan = extension_plan(model, 28, 1)
    assert not plan.fits and plan.remedies[0] == "--train qlora"
    assert extension_plan(model, 28, 1, train="qlora").fits
    small = extension_plan(model, 16, 1, train="qlora", row_length=4096)
    assert small.memory.total < small.machine.room and small.misfit.startswith("measuring the model with all weights")
    recipe, gpu = small.remedies
    assert recipe.startswith("a recipe of your own, rope-patch train") and "no weights by device_map" in recipe
    assert gpu == "one GPU of 17 GiB"
    assert extension_plan(model, 80, 8, train="qlora").engine.config == "ddp"


def test_weights_that_no_single_gpu_holds_cannot_be_measured():
    plan, small = plan_of(80, 8), Machine.elsewhere(12, 8)
    given = replace(plan.options, gradient_checkpointing=True)
    choices = choose(MODEL, given, small)
    engine = engine_of(MODEL, given, choices, small)
    assert engine.bytes_long < small.room and not fits(MODEL, choices, small, engine)


ARGUMENTS = "extend base --to 1600 --data books.jsonl --output out --short 0 --facts 2 --lengths 700".split()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--device-memory", "80"],
            "--device-memory plans for a GPU that is not here, and runs nothing",
        ),
        (["--accelerate-config", "ddp", "--dry-run", "--device-memory", "80"], "and one would train: give --devices"),
        (["--device-memory", "0", "--dry-run"], "--device-memory must be a number above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, message, folder, capsys):
    assert cli.main([*ARGUMENTS, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_needs_no_weights_and_its_status_says_whether_it_fits(folder, capsys):
    for file in (folder / "base").glob("*.safetensors"):
        file.unlink()
    for gib, status in (("8", 0), ("0.001", 1)):
        assert cli.main([*ARGUMENTS, "--dry-run", "--device-memory", gib]) == status
        assert ("DOES NOT FIT: training on rows of 800" in capsys.readouterr().out) == bool(status)
    assert not (folder / "out").exists()


SMALL = {"rows": 4, "rows_per_step": 2, "short": 0.0, "shares": {"text": 1.0}, "prompts": 1, "lengths": (700,)}


def run(output="out", model="base", **options):
    given = {**SMALL, "device": "cpu", "learning_rate": 1e-3, **options}
    return extend(model, to=1600, data="books.jsonl", output=output, tell=lambda _: None, **given)


@pytest.fixture
def quick(folder, monkeypatch):
    monkeypatch.setattr(measuring, "measure", lambda *_: {})
    monkeypatch.setattr(measuring, "table", lambda *_: [])
    monkeypatch.setattr(measuring_parts, "measure_parts", lambda *_: None)
    monkeypatch.setattr(rows, "make", lambda *_: {"contents": [], "rows": 4})


class Launched(Exception):
    pass


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"accelerate_config": "fsdp2", "devices": 2}, "fsdp2 --num-processes 2 --gradient-accumulation-steps 1"),
        ({"devices": 2, "rows_per_step": 4}, "ddp --num-processes 2 --gradient-accumulation-steps 2"),
        (
            {"accelerate_config": "fsdp2-cp", "devices": 2, "objective": "clm"},
            "fsdp2-cp --num-processes 2 --gradient-accumulation-steps 2",
        ),
    ],
)
def test_training_on_several_gpus_is_launched(options, expected, quick, monkeypatch):
    launched = []

    def launch(self, arguments):
        launched.append(f"{self.config} --num-processes {self.n_processes} {' '.join(arguments[2:])}")
        assert arguments[:2] == ["train", "out/recipe.yaml"]
        raise Launched

    monkeypatch.setattr(Launch, "run", launch)
    with pytest.raises(Launched):
        run(**options)
    assert launched == [expected]
    with pytest.raises(Launched):
        run(**{name: value for name, value in options.items() if name not in ("accelerate_config", "devices")})
    assert launched == [expected] * 2, "as it was begun"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerate_config": "ddp"}, "--accelerate-config is for several GPUs, and one would train: give --devices"),
        ({"accelerate_config": "ddp", "devices": 1}, "--accelerate-config is for several GPUs, and one would train"),
        ({"accelerate_config": "zero3", "devices": 2}, "Unknown --accelerate-config 'zero3' of extend. Did you mean"),
        ({"devices": 3}, "--rows-per-step must be a multiple of the 3 GPUs under ddp, got 2"),
        (
            {"accelerate_config": "fsdp2-cp", "devices": 2, "model": "sliding", "view": "standard"},
            "--accelerate-config fsdp2-cp: ",
        ),
    ],
)
def test_what_gpus_cannot_do_is_told_before_anything_is_done(options, message, folder):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**options)
    assert not (folder / "out").exists()


def test_a_checkpoint_of_another_engine_is_refused(quick, folder, monkeypatch):
    monkeypatch.setattr(Launch, "run", lambda *_: pytest.fail("launched"))
    with monkeypatch.context() as patch, pytest.raises(Launched):
        patch.setattr(Launch, "run", lambda *_: (_ for _ in ()).throw(Launched))
        run(accelerate_config="fsdp2", devices=2)
    (folder / "out/training/checkpoint-1").mkdir(parents=True)
    (folder / "out/training/checkpoint-1/trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="checkpoint-1 is of fsdp2, and one GPU cannot go on from it: give the same"):
        run(devices=1)


STOPS_IN_THE_THIRD_STEP = """
from transformers import Trainer

step = Trainer.training_step

def training_step(self, *args, **kwargs):
    if self.state.global_step == 2:
        raise RuntimeError("stopped")
    return step(self, *args, **kwargs)

Trainer.training_step = training_step
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_train_what_one_does_and_one_goes_on_from_their_checkpoint(folder, weights, monkeypatch, capfd):
    """On a CPU, by gloo."""
    monkeypatch.setattr(measuring, "report", lambda results, folder, *_: folder / "report.html")
    paths = [str(folder / "stop"), *(str(ROOT / part) for part in ("", "kernels")), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    before, expected = weights(folder / "base"), weights(run("one", rows=6).model)
    moved = max((expected[name] - before[name]).abs().max() for name in before)
    made = {"two": weights(run("two", rows=6, devices=2).model)}
    (folder / "stop").mkdir()
    (folder / "stop/sitecustomize.py").write_text(STOPS_IN_THE_THIRD_STEP)
    with pytest.raises(ChildProcessError, match="training has ended with status 1, for the reason above"):
        run("both", rows=6, devices=2)
    assert "RuntimeError: stopped" in capfd.readouterr().err and (folder / "both/training/checkpoint-2").is_dir()
    made["both"] = weights(run("both", rows=6, devices=1).model)
    for of in made.values():
        assert max((of[name] - expected[name]).abs().max() for name in before) < moved / 100, "but for rounding"
