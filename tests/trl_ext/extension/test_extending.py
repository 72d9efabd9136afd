"""The whole way on tiny models: what is made, where a stopped run goes on, and what is refused before it begins."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from support.byte_tokenizer import as_transformers_5_17_reads_it
from support.hub import move, publish, use_cache
from support.launched import run_python
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import trl_ext.extension.training as training_module
from rope_patch import export
from rope_patch.export import reloading
from trl_ext import extend
from trl_ext.extension import extending, measuring, rows
from trl_ext.extension.plan import ExtensionPlan
from trl_ext.runs import model_files as model_files_module

TO = 1600
SMALL = {
    "rows": 6, "short": 0.0, "own_tokens": 400, "rows_per_step": 2, "facts": 2, "prompts": 2,
    "lengths": (700, 1500), "device": "cpu",
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """Leaves out what takes longest: loading the result in another process, drawing the page, texts of the model."""
    leave_out(monkeypatch)


def leave_out(monkeypatch):
    def page(results, folder, *_):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.html").touch()
        return folder / "report.html"

    monkeypatch.setattr(extending, "export", partial(export, check=False))
    monkeypatch.setattr(measuring, "report", page)
    monkeypatch.setitem(SMALL, "shares", {"text": 1.0, "questions": 1.0})


@pytest.fixture(scope="module")
def made(inputs, tmp_path_factory):
    """A folder with what `run` makes of "base", and what it returns."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        leave_out(patch)
        return folder / "out", run()


@pytest.fixture
def finished(made, folder, quick):
    """`run` is done in this folder; what it has returned."""
    shutil.copytree(made[0], folder / "out")
    return made[1]


def run(model="base", output="out", said=None, **options):
    tell = (lambda _: None) if said is None else said.append
    return extend(model, to=TO, data="books.jsonl", output=output, tell=tell, **{**SMALL, **options})


@pytest.mark.parametrize(
    ("model", "anew"),
    [("base", False), *(pytest.param(model, True, marks=pytest.mark.slow) for model in ("base", "sliding"))],
)
def test_a_model_is_extended_measured_and_exported(model, anew, folder, weights, capsys, monkeypatch):
    if anew:  # what is exported is loaded in a Python of its own, as users have it
        monkeypatch.setattr(reloading, "subprocess", subprocess)
    said = []
    done = run(model, said=said, targets=["vllm"], rows=8)  # of four steps; behind three the time that is left is told
    assert done.model == folder / "out/model" or done.model.resolve() == (folder / "out/model").resolve()
    config = AutoConfig.from_pretrained(done.model)
    assert config.max_position_embeddings == TO
    native, made = weights(folder / model), weights(done.model)
    assert native.keys() == made.keys() and not torch.equal(native["model.norm.weight"], made["model.norm.weight"])
    assert set(done.commands) == {"transformers", "vllm"} and f"--max-model-len {TO}" in done.commands["vllm"]
    assert done.report.is_file() and (folder / "out/report/results.json").is_file()
    text = "\n".join(said)
    for stage in ("Measuring the model as it is.", "Making training rows.", "Training.", "Measuring it again"):
        assert stage in text
    assert "rescaling: ntk by 4" in text and "Judging by the first steps, training takes" in text
    assert any(line.startswith("passkeys found at 1,500 tokens") for line in done.table)
    assert any(line.startswith("Won: ") for line in done.verdict) and any(
        line.startswith("Lost: ") for line in done.verdict
    )
    printed = capsys.readouterr().out
    assert "{'loss'" not in printed, "no dictionaries of the trainer"


def test_a_dry_run_tells_the_plan_and_writes_nothing(folder):
    before = sorted(folder.rglob("*"))
    plan = run(dry_run=True)
    assert isinstance(plan, ExtensionPlan) and sorted(folder.rglob("*")) == before
    text = str(plan)
    for part in ("parameters", "6 rows, 3 steps of 2", "4,800 tokens", "weights", "together", "Minutes", "--rescale"):
        assert part in text
    assert plan.tokens == 6 * 800 and plan.steps == 3
    too_short = "So few steps show that it runs, not what it gives."
    assert too_short in text and too_short not in str(replace(plan, steps=10))


def test_a_length_that_is_named_twice_is_asked_once(folder):
    plan = run(dry_run=True, lengths=(1500, 700, 1500))
    assert plan.choices.evaluation.value["lengths"] == [1500, 700]


class Stop(RuntimeError):
    pass


class Stopping(TrainerCallback):
    def on_save(self, args, state, control, **_):
        if state.global_step == 2:
            raise Stop


def stop_training(monkeypatch):
    def with_stop(*args, **kwargs):
        trainer = trainer_class(*args, **kwargs)
        trainer.add_callback(Stopping())
        return trainer

    trainer_class = training_module.ShortRowsTrainer
    monkeypatch.setattr(training_module, "ShortRowsTrainer", with_stop)


@pytest.mark.parametrize(("train", "lora_rank"), [("all", None), pytest.param("lora", 4, marks=pytest.mark.slow)])
def test_an_interrupted_training_goes_on_to_the_same_weights(train, lora_rank, folder, finished, weights, monkeypatch):
    whole = finished if lora_rank is None else run(output="whole", train=train, lora_rank=lora_rank)
    with monkeypatch.context() as patch:
        stop_training(patch)
        with pytest.raises(Stop):
            run(output="parts", train=train, lora_rank=lora_rank)
    assert not list((folder / "parts/training").glob("*.safetensors"))
    monkeypatch.setattr(rows, "make", lambda *_: pytest.fail("rows are made again"))
    measure = measuring.measure

    def measured(label, *args):
        assert label == measuring.AFTER, "what was measured is not measured again"
        return measure(label, *args)

    monkeypatch.setattr(measuring, "measure", measured)
    said = []
    parts = run(output="parts", said=said, train=train, lora_rank=lora_rank)
    assert (
        "This resumes what was begun in parts. Done, and not done again: measuring the model as it is, making training "
        "rows. Next: training." in said
    )
    assert "\nTraining, from checkpoint-2 on." in said
    one, other = weights(whole.model), weights(parts.model)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one.keys() == other.keys() and whole.table == parts.table and whole.verdict == parts.verdict


@pytest.mark.slow
def test_a_training_that_was_killed_while_it_saved_goes_on_from_the_checkpoint_before(folder, finished, weights):
    """Weights, optimizer and the trainer's state are written one after the other: of a large model in minutes."""
    with pytest.MonkeyPatch.context() as patch:
        stop_training(patch)
        with pytest.raises(Stop):
            run(output="parts")
    checkpoints = folder / "parts/training"
    assert (checkpoints / "checkpoint-2").is_dir()
    (checkpoints / "checkpoint-2").rename(checkpoints / "checkpoint-3")  # of which the optimizer and what follows lack
    for file in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):
        (checkpoints / "checkpoint-3" / file).unlink()
    said = []
    parts = run(output="parts", said=said)
    assert "\nTraining." in said and "Training, from" not in "".join(said)
    one, other = weights(finished.model), weights(parts.model)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_what_a_killed_export_has_left_is_removed(folder, quick, monkeypatch):
    unfinished = folder / "out/.model-unfinished-abc"

    def killed(source, *_, **__):
        (unfinished / "model").mkdir(parents=True)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(extending, "export", killed)
        with pytest.raises(Stop):
            run()
    run()
    assert not unfinished.exists() and (folder / "out/model/config.json").is_file()


@pytest.mark.parametrize("stage", ["rows", "after"])
def test_a_run_that_was_stopped_in_any_stage_goes_on(stage, folder, quick, monkeypatch):
    owner, name = {"rows": (rows, "make"), "after": (measuring, "measure")}[stage]
    real = getattr(owner, name)

    def stopping(*args, **kwargs):
        if stage == "rows" or args[0] == measuring.AFTER:
            raise Stop
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stopping)
        with pytest.raises(Stop):
            run()
    said = []
    done = run(said=said)
    assert said[0].startswith(
        "This resumes what was begun in out. Done, and not done again: measuring the model as it is"
    )
    assert "\nMeasuring the model as it is." not in said
    assert ("\nMaking training rows." in said) == ("\nTraining." in said) == (stage == "rows")
    assert "\nMeasuring it again, as it is served." in said and done.report.is_file()


def test_a_finished_run_is_not_done_again_and_takes_another_target(folder, finished):
    said = []
    again = run(said=said)
    assert again.table == finished.table and not any("Training" in line for line in said)
    more = run(targets=["sglang"])
    assert set(more.commands) == {"transformers", "sglang"} and (folder / "out/model-sglang/config.json").is_file()


@pytest.mark.slow
def test_a_folder_in_which_another_process_extends_is_refused(folder, quick, monkeypatch):
    """A run that seems to hang, or whose terminal was lost, is easily started again beside itself."""

    def again():
        script = f"from trl_ext import extend; extend('base', to={TO}, data='books.jsonl', output='out', **{SMALL!r})"
        done = run_python("-c", script)
        assert "ValueError: out is in use: another process writes there. Wait for it" in done.stderr
        assert "use another --output" in done.stderr and "This resumes" not in done.stdout
        raise KeyboardInterrupt

    monkeypatch.setattr(extending._Run, "_train", lambda *_: again())
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(extending._Run, "_train", lambda *_: pytest.fail("let go"))
    with pytest.raises(pytest.fail.Exception, match="let go"):
        run()


def test_what_is_exported_has_the_dtype_that_came(folder, quick):
    model = AutoModelForCausalLM.from_pretrained(folder / "base").to(torch.bfloat16)
    model.save_pretrained(folder / "base")
    done = run()
    assert AutoModelForCausalLM.from_pretrained(done.model, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": 800}, "--to must be beyond the window of 800 positions that base was trained on, got 800"),
        ({"data": "none.jsonl"}, "there is no text file none.jsonl"),
        ({"data": "other.jsonl"}, "line 1 of other.jsonl has no field `text`; it has body"),
        ({"data": "short.jsonl"}, "--data has too little text for one training row of 800 tokens"),
        ({"data": "broken.jsonl"}, "line 2 of broken.jsonl is no JSON object"),
        ({"held_out": "short.jsonl"}, "--held-out is too short for 1 rows of --to tokens"),
        ({"output": "base"}, "--output base holds other files than those of an extension"),
        ({"targets": ["vlm"]}, "--target 'vlm'"),
        ({"targets": ["llama.cpp"], "converter": "none.py"}, "there is no convert_hf_to_gguf.py at none.py"),
        ({"converter": "x.py"}, "--converter is llama.cpp's: it needs --target llama.cpp"),
        (
            {"targets": ["vllm"], "rescale": "dynamic-ntk", "rescale_args": {"factor": 4.0}},
            "--rescale dynamic-ntk: vllm would serve this model wrong",
        ),
        (
            {"rescale": "yarn", "rescale_args": {"factor": 1.5}},
            "--rescale yarn: its window is 1200 positions, and --to asks",
        ),
        ({"rescale": "none"}, "--rescale none: Unknown rescaling 'none'. Known: abf, drop-rope, dynamic-ntk"),
        ({"rescale": "skip"}, "--rescale skip: 'skip' is a view; a rescaling is one of abf"),
        ({"rescale_args": {"factor": 2.0}}, "--rescale-args needs --rescale"),
        ({"model": "nothing"}, "there is no folder nothing, and a hub id has"),
        ({"row_length": 900}, "--row-length must be at most the window of 800"),
        ({"row_length": 0}, "--row-length must be an integer of at least 1, got 0"),
        ({"short": 3}, "--short must be a share from 0 to 1, got 3"),
        ({"short": -0.5}, "--short must be a share from 0 to 1, got -0.5"),
        ({"short": float("nan")}, "--short must be a share from 0 to 1, got nan"),
        ({"shares": {"chats": 1.0}}, "a model without a chat template writes no chats"),
        ({"train": "some"}, "--train must be one of all, qkv, lora, got 'some'"),
        ({"view": "pose", "view_args": {"target": 100}}, "target"),
        ({"colour": 1}, "Unknown option 'colour' of extend"),
        ({"lengths": (40,)}, "--lengths 40: 40 tokens are too few for the needles"),
        ({"facts": 40}, "rows of 800 tokens are too short for questions: length must leave room"),
    ],
)
def test_a_mistake_is_told_before_anything_is_done(options, message, folder, monkeypatch):
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("begun"))
    before = sorted(folder.rglob("*"))
    given = {"model": "base", "to": TO, "data": "books.jsonl", "output": "out", **SMALL, **options}
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        extend(given.pop("model"), tell=lambda _: None, **given)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before


def test_a_converter_that_does_not_start_is_told_before_anything_is_done(folder):
    (folder / "convert.py").write_text("import no_such_package\n")
    with pytest.raises(ImportError, match="convert.py does not start: .*no_such_package.* pip install -r "):
        run(targets=["llama.cpp"], converter="convert.py")
    assert not (folder / "out").exists()


def test_a_tokenizer_that_llama_cpp_takes_for_another_is_told_before_anything_is_done(folder, monkeypatch):
    as_transformers_5_17_reads_it().save_pretrained(folder / "base")
    (folder / "convert.py").write_text("")
    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(__spec__=ModuleSpec("sentencepiece", None)))
    with pytest.raises(ValueError, match="would take this tokenizer for SentencePiece's"):
        run(targets=["llama.cpp"], converter="convert.py")
    assert not (folder / "out").exists()


def test_other_options_or_other_text_are_refused_in_a_folder_that_was_begun(folder, monkeypatch):
    stop_at_rows(monkeypatch)
    with pytest.raises(ValueError, match="holds a run with other settings: rows 6 there and 8 here"):
        run(rows=8)
    with (folder / "books.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ValueError, match="other settings: contents of --data or --held-out changed. Use"):
        run()


def stop_at_rows(monkeypatch, **options):
    """Begin a run, and stop it once the model is measured."""
    with monkeypatch.context() as patch:
        patch.setattr(rows, "make", lambda *_: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            run(**options)


def test_another_model_in_the_same_folder_is_refused_in_a_run_that_was_begun(folder, quick, monkeypatch):
    stop_at_rows(monkeypatch)
    for file in (folder / "base").iterdir():  # a copy with other times is the same model
        os.utime(file, (1, 1))
    (folder / "base/README.md").write_text("words")
    run(dry_run=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    model.model.norm.weight.data += 1
    model.save_pretrained(folder / "base")
    with pytest.raises(
        ValueError, match="the model in base is not the one that out was begun with: model.safetensors changed"
    ):
        run()


def test_of_large_files_both_ends_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files_module, "_END", 4)
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "tokenizer.json").write_text("{}")
    found = {}
    for content in ("abcd-----wxyz", "abcd++++wxyz", "Abcd-----wxyz", "abcd-----wxyZ"):
        (tmp_path / "model.safetensors").write_text(content)
        found[content] = model_files_module.model_files(str(tmp_path))
    assert all(files.keys() == {"model.safetensors", "tokenizer.json"} for files in found.values())
    assert len({str(files) for files in found.values()}) == 4
    assert model_files_module.model_files("someone/on-the-hub") == {}


@pytest.mark.parametrize("train", ["all", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_revision_of_a_model_on_the_hub_is_taken_and_named(train, hub, quick, monkeypatch):
    found = {}

    def page(results, folder, name, plan, choices, settings):
        found.update(settings)
        return folder / "report.html"

    monkeypatch.setattr(measuring, "report", page)
    options = {"model": "owner/base", "model_revision": "v1", "train": train}
    assert "The model: owner/base at revision v1" in str(run(dry_run=True, **options))
    done = run(**options)
    assert found["model"] == "owner/base at revision v1"
    assert json.loads((hub / "out/extend.json").read_text())["model_revision"] == "v1"
    card = (done.model / "README.md").read_text()
    assert "[owner/base](https://huggingface.co/owner/base) at revision `v1`, trained with rope-patch." in card
    with pytest.raises(ValueError, match="holds a run with other settings: model_revision 'v1' there and 'v1.1' here"):
        run(**{**options, "model_revision": "v1.1"})


@pytest.mark.parametrize("train", ["all", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("revision", ["dev", None])
def test_a_branch_is_the_commit_that_it_was_at_the_start(revision, train, folder, quick, monkeypatch, weights):
    def write(to, shift=0.0):
        shutil.copytree(folder / "base", to, dirs_exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(to)
        model.lm_head.weight.data += shift
        model.save_pretrained(to)

    use_cache(monkeypatch, folder / "hub")
    branch = revision or "main"
    publish(folder / "hub", "owner/base", **{branch: write, "later": partial(write, shift=9.0)})
    options = {"model": "owner/base", "model_revision": revision, "train": train}
    stop_at_rows(monkeypatch, **options)
    commit = move(folder / "hub", "owner/base", branch, to="later")
    assert json.loads((folder / "out/extend.json").read_text())["model_commit"] == commit
    said = "owner/base" if revision is None else f"owner/base at revision dev, commit {commit}"
    assert f"The model: {said}" in str(run(dry_run=True, **options))
    done = run(**options)
    assert weights(done.model)["lm_head.weight"].mean() < 1, "and not those of later"
    assert f"at revision `{commit}`, trained" in (done.model / "README.md").read_text()
    assert json.loads((folder / "out/extend.json").read_text())["model_commit"] == commit


def test_a_revision_that_is_none_is_refused_before_anything_is_done(hub):
    with pytest.raises(ValueError, match="owner/base at revision v2 is no folder .*: v2 is not a valid git identifier"):
        run(model="owner/base", model_revision="v2")
    with pytest.raises(ValueError, match="--model-revision v1 is of a model on the hub, and base is a folder: leave"):
        run(model="base", model_revision="v1")
    assert not (hub / "out").exists()


def test_an_adapter_is_to_be_merged_first(folder):
    (folder / "base/adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="base is an adapter: merge it first, with rope-patch export base --output"):
        run()


def test_what_is_exported_promises_the_window_that_was_trained(folder, finished):
    export(finished.model, folder / "copy", window=1200, check=False)
    assert AutoConfig.from_pretrained(folder / "copy").max_position_embeddings == 1200
    with pytest.raises(ValueError, match="window must be at most the 1600 positions"):
        export(finished.model, folder / "more", window=4000)


def test_the_tokenizer_of_an_export_promises_no_more_than_its_config(folder, finished):
    config = json.loads((finished.model / "tokenizer_config.json").read_text())
    assert config.get("model_max_length") != 1600
    (finished.model / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 1600}))
    for window, named in ((1200, 1200), (None, 1600)):
        export(finished.model, folder / f"copy-{named}", window=window, check=False)
        assert AutoTokenizer.from_pretrained(folder / f"copy-{named}").model_max_length == named


def test_a_finished_run_whose_model_is_gone_exports_it_again(folder, finished):
    shutil.rmtree(finished.model)
    run()
    assert (finished.model / "config.json").is_file()
    shutil.rmtree(finished.model)
    shutil.rmtree(folder / "out" / "training")
    with pytest.raises(ValueError, match="model is no longer there, nor is .*training"):
        run()
