"""Plans for GPUs that are not here: what they need, how long they take, what would make them fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scaling import extended_model, extension_plan
from support.characters import character_tokenizer
from support.shapes import size
from transformers import AutoConfig

from trl_ext import cli, extend
from trl_ext.extension import extending, measuring
from trl_ext.extension.choices import choose
from trl_ext.extension.duration import H200, step_calls, step_operations
from trl_ext.extension.fitting import engine_of, fits
from trl_ext.extension.machine import GIB, Machine
from trl_ext.memory.step import Step
from trl_ext.recipes.engine_advice import EngineNeed
from trl_ext.recipes.fine_tuning import train_recipe

EXTENSIONS = json.loads((Path(__file__).parents[3] / "research" / "results" / "extension-memory-h200.json").read_text())
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
    assert "[arithmetic from steps on an H200, 470 TFLOP/s]" in text and "calibration" not in text
    assert "[measured by us on SmolLM2; " in text and "[measured; " not in text


def test_hours_elsewhere_are_those_of_an_h200():
    """The steps that were measured on one, each within a quarter; scaling.py has the same operations a second."""
    for run in EXTENSIONS["runs"]:
        shape = size(run["shape"])
        step = Step(run["train"], 64, run["length"], True, run["checkpointing"], run["objective"] == "native-distill")
        seconds = H200.seconds(step_operations(shape, step, run["length"]), step_calls(shape, step))
        assert seconds == pytest.approx(run["seconds_a_row"], rel=0.25), run["case"]


def test_several_gpus_divide_the_hours_and_each_holds_what_the_trainer_counts():
    one, eight = plan_of(80), plan_of(80, 8)
    assert eight.choices == one.choices and 1 <= 8 * eight.minutes.train / one.minutes.train < 1.3
    assert eight.minutes.measure == one.minutes.measure, "extend measures on one"
    assert eight.engine.config == "ddp" and eight.engine.bytes == pytest.approx(one.memory.total, rel=0.05)
    assert "--accelerate-config ddp --num-processes 8 --gradient-accumulation-steps 1 --output-dir out-8-gpus" in str(
        eight
    )


def test_all_weights_that_one_gpu_cannot_hold_are_split_over_eight():
    assert not plan_of(80, train="all").fits
    plan = plan_of(80, 8, train="all")
    assert plan.fits and plan.engine.config == "fsdp2" and plan.engine.bytes < 80 * GIB < plan.memory.total
    assert "it writes the recipe and stops" in str(plan) and "--output-dir" not in str(plan)


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
    assert small.remedies == ["one GPU of 17 GiB"]
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
        (["--devices", "8", "--dry-run"], "--devices needs --device-memory"),
        (["--device-memory", "0", "--dry-run"], "--device-memory must be a number above 0"),
        (["--device-memory", "80", "--device", "cpu", "--dry-run"], "leave --device cpu out"),
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


@pytest.mark.slow
def test_where_one_gpu_is_too_small_extend_writes_the_recipe_and_goes_on_with_its_result(folder, monkeypatch):
    """As if torch saw two GPUs; the trainer of the test is the one that `rope-patch train` runs."""
    engine = EngineNeed("fsdp2", 2, 1, 1)
    monkeypatch.setattr(extending, "engine_of", lambda facts, options, choices, machine: engine)
    monkeypatch.setattr(measuring, "report", lambda results, folder, *_: folder / "report.html")
    given = {"rows": 2, "short": 0.0, "shares": {"text": 1.0}, "prompts": 1, "lengths": (700,), "device": "cpu"}
    said = []
    arguments = {"to": 1600, "data": "books.jsonl", "output": "out", "tell": said.append, **given}
    with pytest.raises(ValueError, match="rope-patch train out/recipe.yaml --accelerate-config fsdp2 --num-processes"):
        extend("base", **arguments)
    train_recipe("out/recipe.yaml")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    done = extend("base", **arguments)
    assert done.model.is_dir() and "Measuring it again, as it is served." in "".join(said)
    assert AutoConfig.from_pretrained(done.model).max_position_embeddings == 1600
