"""Every command that takes a model takes a revision of it on the hub: weights, config, tokenizer and what is said."""

import json

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.hub import publish, use_cache
from support.tiny import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import export
from trl_ext import cli
from trl_ext.cli.measure import _at_revisions
from trl_ext.cli.model_spec import ModelSpec

WINDOWS = {"v1": 96, "main": 160}


def written_by(name):
    """A function that writes a model whose window, norm and tokenizer tell its revision."""

    def write(folder):
        model = tiny(vocab_size=CHARACTERS, max_position_embeddings=WINDOWS[name])
        model.model.norm.weight.data.fill_(WINDOWS[name] / 64)
        model.save_pretrained(folder)
        tokenizer = character_tokenizer()
        tokenizer.chat_template = f"{{# {name} #}}{{{{ messages[0]['content'] }}}}"
        tokenizer.save_pretrained(folder)

    return write


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """With owner/base and owner/other, each with v1 and main."""
    folder = tmp_path_factory.mktemp("hub")
    for repository in ("owner/base", "owner/other"):
        publish(folder, repository, **{name: written_by(name) for name in WINDOWS})
    return folder


@pytest.fixture
def folder(tmp_path, hub, monkeypatch):
    """The current folder, with a model and a text, beside the hub."""
    use_cache(monkeypatch, hub)
    written_by("main")(tmp_path / "local")
    (tmp_path / "text.txt").write_text("It was a dark night. Who was there? " * 90)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def revision_in(folder):
    """Which one a checkpoint is of, in all of its files."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    (name,) = (name for name in WINDOWS if f"# {name} #" in tokenizer.chat_template)
    assert torch.all(model.model.norm.weight == WINDOWS[name] / 64)
    return name, model.config.max_position_embeddings


@pytest.mark.parametrize(
    ("rescaled", "revision"), [("", "0" * 40), pytest.param("@yarn:factor=2", "v1", marks=pytest.mark.slow)]
)
def test_an_export(rescaled, revision, folder):
    command = ["export", f"owner/base{rescaled}", "--model-revision", revision, "--output", "out", "--no-check"]
    assert cli.main(command) == 0
    assert revision_in("out") == ("v1", 192 if rescaled else 96)
    said = f"[owner/base](https://huggingface.co/owner/base) at revision `{revision}`"
    assert said in (folder / "out/README.md").read_text()
    assert cli.main(["export", "owner/base", "--output", "newest", "--no-check"]) == 0
    assert revision_in("newest") == ("main", 160) and "at revision" not in (folder / "newest/README.md").read_text()


def test_a_loaded_model_goes_with_the_tokenizer_of_the_commit_that_it_is_of(folder):
    model = AutoModelForCausalLM.from_pretrained("owner/base", revision="v1")
    if not hasattr(model.config, "_commit_hash"):  # newer versions of Transformers record none
        model.config._commit_hash = "0" * 40
    export(model, "out", check=False)
    assert revision_in("out") == ("v1", 96)
    model.config._commit_hash = None
    export(model, "said", check=False, revision="v1")
    assert revision_in("said") == ("v1", 96) and "at revision `v1`" in (folder / "said/README.md").read_text()


def test_a_check(folder, monkeypatch, capsys):
    monkeypatch.setattr("rope_patch.checks.model_checks.CHECKS", {})
    for revision, window in (("v1", 96), ("main", 160)):
        assert cli.main(["check", "owner/base", "--model-revision", revision, "--tokens", "16"]) == 0
        assert f"trained window {window} positions" in " ".join(capsys.readouterr().out.split())


def test_a_probe(folder, capsys):
    arguments = ["--length", "400", "--rows", "1", "--text", "text.txt", "--device", "cpu"]
    assert cli.main(["probe", "--model", "owner/base", "--model-revision", "v1", *arguments]) == 0
    assert "within the 96 positions that its config names" in capsys.readouterr().out


def test_rows(folder):
    arguments = ["--text", "text.txt", "--rows", "2", "--shares", "text=1", "--short", "0", "--output", "rows.jsonl"]
    assert cli.main(["rows", "owner/base", "--model-revision", "v1", *arguments]) == 0
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [len(row["input_ids"]) for row in rows] == [96, 96]


EVAL = ["--cliff", "--length", "300", "--rows", "1", "--text", "text.txt", "--device", "cpu", "--report", "report"]


def evaluated(folder, *arguments):
    """Settings of the report, and the loss of each model."""
    assert cli.main(["eval", *arguments, *EVAL]) == 0
    stored = json.loads((folder / "report/results.json").read_text())
    losses = {label: sum(curve["loss"][1:]) for label, curve in stored["results"]["cliff"].items()}
    return stored["settings"], losses


def test_eval_of_two_revisions_and_a_folder(folder):
    models = ["--model", "old=owner/base", "--model", "new=owner/base", "--model", "here=local"]
    settings, losses = evaluated(folder, *models, "--model-revision", "old=v1")
    assert [settings[f"model {label}"] for label in ("old", "new", "here")] == [
        "old=owner/base at revision v1", "new=owner/base", "here=local",
    ]  # fmt: skip
    assert losses["old"] != losses["new"] == losses["here"] and settings["window"].startswith("96 positions")


def test_what_vllm_loads_is_of_the_revision(folder):
    spec = ModelSpec.parse("owner/base")
    assert spec.for_others == "owner/base"
    assert revision_in(spec.of_revision("v1").for_others) == ("v1", 96)


def test_the_only_model_on_the_hub_needs_no_label():
    specs = [ModelSpec.parse(text) for text in (".", "owner/base")]
    assert [spec.model_revision for spec in _at_revisions(specs, ["v1"])] == [None, "v1"]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["export", "local", "--output", "out"], "--model-revision v1 is of a model on the hub, and local is a folder"),
        (["export", "local@pi:factor=2", "--output", "out"], "and local is a folder: leave it out"),
        (["check", "local"], "and local is a folder"),
        (["probe", "--model", "local"], "and local is a folder"),
        (["rows", "local", "--output", "rows.jsonl", "--text", "text.txt"], "and local is a folder"),
        (["eval", "--model", "local"], "and local is a folder"),
        (
            ["eval", "--model", "owner/base", "--model", "owner/other"],
            "must be LABEL=NAME, with a label of --model, base",
        ),
        (["eval", "--model", "owner/base", "--model-revision", "bse=v1"], "a label of --model, base, got bse=v1"),
        (
            ["export", "owner/base", "--output", "out", "--model-revision", "v3"],
            "owner/base at revision v3 is no folder with a checkpoint, and",
        ),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(command, why, folder, monkeypatch, capsys):
    def fail(*_, **__):
        pytest.fail("loaded")

    monkeypatch.setattr(ModelSpec, "load", fail)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    name, *rest = command
    assert cli.main([name, *(["--model-revision", "v1", *rest] if "bse=v1" not in rest else rest)]) == 2
    assert why in capsys.readouterr().err
    assert not (folder / "out").exists() and not (folder / "rows.jsonl").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["export", "", "--output", "out"],
        ["extend", "", "--to", "512", "--data", "../text.txt", "--output", "out"],
    ],
    ids=lambda command: command[0],
)
def test_an_empty_name_is_not_the_folder_that_one_is_in(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder / "local")
    assert cli.main(command) == 2
    assert "must be a hub id or the folder of a checkpoint, got an empty name" in capsys.readouterr().err


def test_a_revision_of_a_model_that_is_not_of_the_hub_is_refused(folder):
    with pytest.raises(ValueError, match="revision v1 is of a model on the hub, and local is a folder: leave it out"):
        export("local", "out", revision="v1")
    for model, why in (
        (AutoModelForCausalLM.from_pretrained("local"), "local is a folder"),
        (tiny(), "this one was loaded from nowhere"),
    ):
        with pytest.raises(ValueError, match=f"revision v1 is of a model on the hub, and {why}"):
            export(model, "out", revision="v1")
    assert not (folder / "out").exists()
