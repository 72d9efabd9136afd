"""`extend` on tiny models: what it makes, where a stopped run is resumed, and what is refused before it begins."""

import json
import os
import re
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import trl_ext.extension.training as training_module
from rope_patch import export, patch_model
from rope_patch.export import reloading
from trl_ext import extend
from trl_ext.cli.status import status
from trl_ext.extension import extending, measuring, rows
from trl_ext.extension.plan import ExtensionPlan
from trl_ext.recipes import fine_tuning
from trl_ext.runs import model_files as model_files_module

TO = 1600
SMALL = {
    "rows": 6, "short": 0.0, "own_tokens": 400, "rows_per_step": 2, "facts": 2, "prompts": 2, "learning_rate": 1e-3,
    "lengths": (700, 1500), "untrained": True, "device": "cpu",
}  # fmt: skip


def run(model="base", output="out", said=None, **options):
    tell = (lambda _: None) if said is None else said.append
    return extend(model, to=TO, data="books.jsonl", output=output, tell=tell, **{**SMALL, **options})


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A folder where "base" was extended in one call, what that returned and what it printed."""
    folder, said = tmp_path_factory.mktemp("made"), []
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as quick:
        patch.chdir(folder)
        quick.setattr("trl_ext.extension.machine._SECONDS", 0.0)
        done = run(said=said)
    return SimpleNamespace(folder=folder, done=done, said=said)


@pytest.fixture
def finished(whole, folder):
    """A copy of `whole` in this folder; what the call has returned."""
    shutil.copytree(whole.folder / "out", folder / "out")
    return whole.done


@pytest.fixture
def quick(monkeypatch):
    """Leaves out what takes longest: loading the result in another process, drawing the page, texts of the model."""
    monkeypatch.setattr(fine_tuning, "export", lambda *given, **options: export(*given, **{**options, "check": False}))
    monkeypatch.setattr(measuring, "report", lambda results, folder, *_: folder / "report.html")
    monkeypatch.setitem(SMALL, "shares", {"text": 1.0, "questions": 1.0})


def changed(before, after):
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_a_model_is_extended_measured_and_exported(whole, weights):
    out, done = whole.folder / "out", whole.done
    config = AutoConfig.from_pretrained(out / "model")
    assert config.max_position_embeddings == TO and config.dtype == torch.bfloat16, "the dtype that came"
    native, made = weights(whole.folder / "base"), weights(out / "model")
    assert native.keys() == made.keys() and changed(native, made)
    assert done.model.name == "model" and list(done.commands) == ["transformers"]
    assert done.report.name == "report.html" and (out / "report/results.json").is_file()
    assert any(line.startswith("passkeys of several people found at 1,500 tokens") for line in done.table)
    for word in ("untrained won: ", "untrained lost: ", "after won: ", "after lost: "):
        assert any(line.startswith(word) for line in done.verdict)


def test_the_scaling_alone_is_measured_beside_both(whole):
    assert whole.done.table[0].split() == ["before", "untrained", "after"]
    found = json.loads((whole.folder / "out/report/results.json").read_text())["results"]["cliff"]
    books = [json.loads(line)["text"] for line in (whole.folder / "books.jsonl").read_text().splitlines()]
    parts = [part for book in (books[0], books[10]) for part in (book[: len(book) // 2], book[len(book) // 2 :])]
    tokenizer = AutoTokenizer.from_pretrained(whole.folder / "base")
    ids = torch.tensor([tokenizer(part)["input_ids"][:512] for part in parts])  # a CPU reads so many
    for label, factor in (("before", None), ("untrained", 4.0)):
        model = AutoModelForCausalLM.from_pretrained(whole.folder / "base", dtype=torch.float32)
        if factor:
            patch_model(model, "ntk", factor=factor)
        logits = model(ids).logits[:, :-1].transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(0)
        torch.testing.assert_close(torch.tensor(found[label]["loss"][1:]), losses, atol=1e-4, rtol=1e-4)


def test_what_is_done_is_printed(whole):
    text = "\n".join(whole.said)
    for step in ("Measuring the model as it is.", "Making training rows.", "Training, and", "Measuring it again"):
        assert step in text
    assert "rescaling: ntk by 4" in text and "together: 6 rows" in text and "3 steps, 4,800 tokens" in text
    assert "{'loss'" not in text, "no dictionaries of the trainer"


def test_qlora_trains_on_4_bits_and_is_merged_into_the_weights_as_they_came(folder, quick, weights, monkeypatch):
    pytest.importorskip("bitsandbytes")
    held, step = set(), training_module.ShortRowsTrainer.training_step

    def looking(trainer, model, *given):
        held.update((type(p).__name__, p.dtype, p.requires_grad) for p in model.parameters())
        return step(trainer, model, *given)

    monkeypatch.setattr(training_module.ShortRowsTrainer, "training_step", looking)
    done = run(train="qlora", lora_rank=4, untrained=False)
    trained = {kind for kind in held if kind[2]}
    assert held - trained == {("Params4bit", torch.uint8, False), ("Parameter", torch.float32, False)}
    assert trained == {("Parameter", torch.float32, True)}
    before, after = weights(folder / "base"), weights(done.model)
    changed = {name.split(".")[-2] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "quantization_config" not in (done.model / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "sliding"])
def test_the_export_is_loaded_in_a_python_of_its_own(model, folder, weights, monkeypatch):
    monkeypatch.setattr(reloading, "subprocess", subprocess)
    done = run(model, targets=["vllm"])
    assert set(done.commands) == {"transformers", "vllm"} and f"--max-model-len {TO}" in done.commands["vllm"]
    assert changed(weights(folder / model), weights(done.model))


def test_a_dry_run_prints_the_plan_and_writes_nothing(folder):
    before = sorted(folder.rglob("*"))
    plan = run(dry_run=True, lengths=(1500, 700, 1500))
    assert isinstance(plan, ExtensionPlan) and sorted(folder.rglob("*")) == before
    text = str(plan)
    for part in ("parameters", "6 rows, 3 steps of 2", "4,800 tokens", "weights", "together", "Minutes", "--rescale"):
        assert part in text
    assert plan.tokens == 6 * 800 and plan.steps == 3
    too_short = "So few steps show that it runs, not what it gives."
    assert too_short in text and too_short not in str(replace(plan, steps=10))
    assert plan.choices.evaluation.value["lengths"] == [1500, 700], "each once"


class Stop(RuntimeError):
    pass


def stop(*_, **__):
    raise Stop


@pytest.mark.parametrize("train", ["all", *(pytest.param(t, marks=pytest.mark.slow) for t in ("lora", "qlora"))])
def test_a_run_that_is_stopped_in_any_step_ends_with_the_same_weights(train, whole, folder, weights, monkeypatch):
    options = {} if train == "all" else {"train": train, "lora_rank": 4}
    done = whole.done if train == "all" else run(output="whole", **options)
    expected = weights(whole.folder / "out/model" if train == "all" else done.model)
    real, measure, step = rows.make, measuring.measure, training_module.ShortRowsTrainer.training_step
    said, measured = [], []

    def stopped(owner, name, replacement):
        said.clear()
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(owner, name, replacement)
            run(output="parts", said=said, **options)

    def measuring_once(label, *given):
        measured.append(label)
        return measure(label, *given)

    def also_run_elsewhere(*_):
        with pytest.raises(ValueError, match="parts is in use: another process writes there. Wait for it.*--output"):
            run(output="parts", **options)
        raise Stop

    def in_the_third_step(trainer, *given):
        return stop() if trainer.state.global_step == 2 else step(trainer, *given)

    monkeypatch.setattr(measuring, "measure", measuring_once)
    stopped(extending, "write_whole", stop)  # before there is a record
    stopped(rows, "make", also_run_elsewhere)
    monkeypatch.setattr(rows, "make", lambda *given: stop() if (folder / "parts/rows.jsonl").exists() else real(*given))
    stopped(training_module.ShortRowsTrainer, "training_step", in_the_third_step)
    assert said[0].startswith(
        "Resuming the run in parts. Finished: measuring the model as it is, measuring it untrained. Next: making"
    )
    stopped(fine_tuning, "export", stop)
    assert "\nTraining from checkpoint-2 on, and exporting the result." in said
    stopped(measuring, "table", stop)
    said.clear()
    parts = run(output="parts", said=said, **options)
    assert said == ["The run in parts is finished. This is the result:"]
    assert measured == [measuring.BEFORE, measuring.UNTRAINED, measuring.AFTER], "each once"
    made = weights(parts.model)
    assert made.keys() == expected.keys() and all(torch.equal(made[name], expected[name]) for name in made)
    assert (parts.table, parts.verdict) == (done.table, done.verdict)


def test_the_status_of_a_run_says_where_it_stands(folder, quick, monkeypatch):
    step, during = training_module.ShortRowsTrainer.training_step, []

    def looking(trainer, *given):
        if trainer.state.global_step == 2:
            during.extend(status(folder / "out"))
            stop()
        return step(trainer, *given)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(training_module.ShortRowsTrainer, "training_step", looking)
        run(untrained=False)
    assert during[0] == f"{folder}/out: extending base to 1,600 positions, running"
    assert during[1].endswith("making training rows. Then: training and exporting, for 0 minutes.")
    assert re.fullmatch(r"Step 2 of 3, loss \d\.\d{3} at \d\d:\d\d:\d\d, about 0 minutes left.", during[2])
    assert during[3] == f"Last checkpoint: {folder}/out/training/checkpoint-2"
    assert status(folder / "out")[0].endswith("positions, stopped")
    done = run(untrained=False)
    assert status(folder / "out")[1:-1] == done.verdict and status(folder / "out")[0].endswith("positions, finished")
    assert (folder / "out/result.txt").read_text() == f"{done}\n"


def test_a_finished_run_is_not_done_again_and_takes_another_target(folder, finished, quick, monkeypatch):
    monkeypatch.delitem(SMALL, "shares")
    monkeypatch.setattr(extending, "export", partial(export, check=False))
    for owner, name in ((measuring, "measure"), (rows, "make"), (training_module, "run")):
        monkeypatch.setattr(owner, name, stop)
    assert run().table == finished.table
    shutil.rmtree(folder / "out/training")  # as docs/extend.md allows
    more = run(targets=["sglang"])
    assert set(more.commands) == {"transformers", "sglang"} and (folder / "out/model-sglang/config.json").is_file()


def test_a_model_that_is_gone_is_exported_again(folder, finished, quick, monkeypatch):
    monkeypatch.delitem(SMALL, "shares")
    shutil.rmtree(folder / "out/model")
    monkeypatch.setattr(fine_tuning, "_train", stop)
    run()
    assert (folder / "out/model/config.json").is_file()


def test_the_folder_of_another_run_is_refused(folder, finished):
    with pytest.raises(ValueError, match="holds a run with other settings: rows 6 there and 8 here"):
        run(rows=8)
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
    with (folder / "books.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ValueError, match="other settings: contents of --data or --held-out changed. Use"):
        run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": 800}, "--to must be longer than the context window of base, 800 positions, got 800"),
        ({"data": "none.jsonl"}, "there is no text file none.jsonl"),
        ({"data": "other.jsonl"}, "line 1 of other.jsonl has no field `text`; it has body"),
        ({"data": "short.jsonl"}, "--data has too little text for one training row of 800 tokens"),
        ({"data": "broken.jsonl"}, "line 2 of broken.jsonl is no JSON object"),
        ({"held_out": "short.jsonl"}, "--held-out is too short for 4 rows of 512 tokens"),
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
            "--rescale yarn: its window is 1200 positions, and --to is 1600",
        ),
        ({"rescale": "none"}, "--rescale none: Unknown rescaling 'none'. Known: abf, cope, drop-rope, dynamic-ntk"),
        ({"rescale": "skip"}, "--rescale skip: 'skip' is a view; a rescaling is one of abf"),
        ({"rescale_args": {"factor": 2.0}}, "--rescale-args needs --rescale"),
        ({"model": "nothing"}, "there is no folder nothing, and a hub id has"),
        ({"row_length": 900}, "--row-length must be at most the context window of 800"),
        ({"row_length": 0}, "--row-length must be an integer of at least 1, got 0"),
        ({"short": 3}, "--short must be a share from 0 to 1, got 3"),
        ({"short": float("nan")}, "--short must be a share from 0 to 1, got nan"),
        ({"shares": {"chats": 1.0}}, "a model without a chat template writes no chats"),
        ({"train": "some"}, "--train must be one of all, qkv, lora, qlora, got 'some'"),
        ({"view": "pose", "view_args": {"target": 100}}, "target"),
        ({"colour": 1}, "Unknown option 'colour' of extend"),
        ({"lengths": (40,)}, "--lengths 40: 40 tokens are too few for the needles"),
        ({"facts": 40}, "rows of 800 tokens are too short for chain: length must leave room"),
        ({"facts": 40, "shares": {"order": 1}}, "rows of 800 tokens are too short for order: length must leave room"),
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


@pytest.mark.parametrize(
    ("revision", "train"),
    [("dev", "all"), *(pytest.param(r, "lora", marks=pytest.mark.slow) for r in ("dev", None))],
)
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
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(rows, "make", stop)
        run(**options)
    commit = move(folder / "hub", "owner/base", branch, to="later")
    assert json.loads((folder / "out/extend.json").read_text())["model_commit"] == commit
    said = "owner/base" if revision is None else f"owner/base at revision dev, commit {commit}"
    assert f"The model: {said}" in str(run(dry_run=True, **options))
    done = run(**options)
    assert weights(done.model)["lm_head.weight"].mean() < 1, "and not those of later"
    card = (done.model / "README.md").read_text()
    assert f"[owner/base](https://huggingface.co/owner/base) at revision `{commit}`, trained with rope-patch." in card
    with pytest.raises(ValueError, match="holds a run with other settings: model_revision"):
        run(**{**options, "model_revision": "later"})
    with pytest.raises(ValueError, match="owner/base at revision v2 is no folder with a checkpoint, and from the hub"):
        run(output="other", model="owner/base", model_revision="v2")
    with pytest.raises(ValueError, match="--model-revision v1 is of a model on the hub, and base is a folder: leave"):
        run(output="other", model="base", model_revision="v1")
    assert not (folder / "other").exists()


def test_an_adapter_is_to_be_merged_first(folder):
    (folder / "base/adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="base is an adapter: merge it first, with rope-patch export base --output"):
        run()


def test_what_is_exported_promises_the_window_that_was_trained(folder, finished):
    export(folder / "out/model", folder / "copy", window=1200, check=False)
    assert AutoConfig.from_pretrained(folder / "copy").max_position_embeddings == 1200
    with pytest.raises(ValueError, match="window must be at most the 1600 positions"):
        export(folder / "out/model", folder / "more", window=4000)


def test_the_tokenizer_of_an_export_promises_no_more_than_its_config(folder, finished):
    config = json.loads((folder / "out/model/tokenizer_config.json").read_text())
    assert config.get("model_max_length") != 1600
    (folder / "out/model/tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 1600}))
    for window, named in ((1200, 1200), (None, 1600)):
        export(folder / "out/model", folder / f"copy-{named}", window=window, check=False)
        assert AutoTokenizer.from_pretrained(folder / f"copy-{named}").model_max_length == named
