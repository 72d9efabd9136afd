"""`rope-patch rows` on a tiny model: the file it writes, what it prints, and what it refuses."""

import errno
import json
import lzma

import pytest
import torch
from datasets import load_dataset
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from trl_ext import cli
from trl_ext.cli.model_spec import ModelSpec
from trl_ext.rows import row_file

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HOT = ["--temperature", "100", "--max-user-tokens", "20", "--max-reply-tokens", "30", "--batch-size", "16"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With models "instruct" and "base", which write short texts, and a text."""
    for name, template in (("instruct", TEMPLATE), ("base", None)):
        tiny(vocab_size=CHARACTERS, max_position_embeddings=1600).save_pretrained(tmp_path / name)
        tokenizer = character_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "books.jsonl").write_text(json.dumps({"text": "It was a dark night. Who was there? " * 90}) + "\n")
    monkeypatch.chdir(tmp_path)
    load, more = ModelSpec.load, torch.zeros(CHARACTERS)
    more[2], more[[0, 1, 3, 127, 128, 129]] = 300.0, -1e9

    def load_one_that_ends(spec, *options):
        model = load(spec, *options)
        model.lm_head.register_forward_hook(lambda _, __, logits: logits + more)
        return model

    monkeypatch.setattr(ModelSpec, "load", load_one_that_ends)
    return tmp_path


def run(*arguments):
    return cli.main(["rows", *arguments, "--device", "cpu"])


def read(path):
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def test_rows_are_written_and_told(folder, capsys):
    options = ["--text", "books.jsonl", "--rows", "6", "--facts", "2", "--short", "0", "--length", "800"]
    options += ["--shares", "text=1,chats=1,questions=1"]
    assert run("instruct", *options, "--output", "rows.jsonl", *HOT) == 0
    rows = read(folder / "rows.jsonl")
    assert len(rows) == 6 and all(list(row) == ["input_ids", "completion_mask"] for row in rows)
    assert all(len(row["input_ids"]) == len(row["completion_mask"]) == 800 for row in rows)
    labelled = sum(map(sum, (row["completion_mask"] for row in rows)))
    captured = capsys.readouterr()
    assert sum(any(row["completion_mask"]) for row in rows) == 2
    for told in (
        "text: 2 of 800 tokens; 0 tokens are labelled",
        "chats: 2 of 800 tokens; 0 tokens are labelled",
        f"questions: 2 of 800 tokens; {labelled} tokens are labelled",
        "together: 6 rows, 4,800 tokens",
        "Rows: rows.jsonl",
    ):
        assert told in captured.out.splitlines()
    assert "chats of tokens" not in captured.out and "The model wrote" in captured.out
    assert "rows of questions: 100%" in captured.err and "chats of the model: 100%" in captured.err
    assert run("instruct", *options, "--output", "again.jsonl.xz", *HOT) == 0
    assert read(folder / "again.jsonl.xz") == rows
    for file in ("rows.jsonl", "again.jsonl.xz"):
        assert load_dataset("json", data_files=file, split="train", cache_dir="cache").to_list() == rows


def test_without_chats_no_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(ModelSpec, "load", lambda *_: pytest.fail("loaded"))
    options = ["--text", "books.jsonl", "--rows", "4", "--facts", "1", "--shares", "text=1,questions=1"]
    assert run("base", *options, "--output", "rows.jsonl", "--label-all", "--length", "1200") == 0
    rows = read(folder / "rows.jsonl")
    assert {len(row["input_ids"]) for row in rows} == {1200}, "a quarter of two is none"
    assert sum(all(row["completion_mask"]) for row in rows) == 2


def test_a_base_model_writes_texts(folder, capsys):
    options = ["--rows", "2", "--shares", "own_texts=1", "--temperature", "100", "--batch-size", "16"]
    assert run("base", *options, "--output", "rows.jsonl", "--length", "400") == 0
    rows = read(folder / "rows.jsonl")
    assert [len(row["input_ids"]) for row in rows] == [400, 400] and "own_texts: 2 of 400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (KeyboardInterrupt(), 130, "Stopped."),
        (OSError(errno.ENOSPC, "No space left"), 2, "rows: rows.jsonl could not be written, on a disk with "),
    ],
    ids=["Ctrl-C", "full disk"],
)
def test_what_is_interrupted_leaves_no_file(error, status, told, folder, monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def dumps(_):
            raise error

    monkeypatch.setattr(row_file, "json", Interrupted)
    before = sorted(folder.iterdir())
    options = ["--text", "books.jsonl", "--rows", "2", "--shares", "text=1", "--length", "100"]
    assert run("base", *options, "--output", "rows.jsonl") == status
    assert sorted(folder.iterdir()) == before and told in capsys.readouterr().err


TEXT = ["--text", "books.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["base", *TEXT, "--shares", "chats=1"],
            "no chat template, so this is a base model: it writes no chats. Use own_texts in place of chats",
        ),
        (["instruct"], "--text must name files, as --shares asks for text or questions."),
        (["instruct", *TEXT, "--output", "rows.json"], "--output must end with .jsonl or .jsonl.xz, got rows.json."),
        (["instruct", *TEXT, "--output", "books.jsonl"], "--output books.jsonl is there already"),
        (["instruct", *TEXT, "--output", "no/rows.jsonl"], "--output no/rows.jsonl: no file can be written in no."),
        (["instruct", *TEXT, "--facts", "40"], "length must leave room for text between 40 facts"),
        (
            ["base", *TEXT, "--length", "900", "--facts", "1", "--shares", "questions=1"],
            "got 112. Short rows have an eighth of length 900: give a larger length, or short=0 (--short 0), which",
        ),
        (["instruct", *TEXT, "--short", "2"], "short must be a share from 0 to 1, got 2.0."),
        (["instruct", *TEXT, "--chat", "2"], "chat must be a share from 0 to 1, got 2.0."),
        (["instruct", *TEXT, "--facts", "0"], "facts must be an integer of at least 1, got 0."),
        (["instruct", "--text", "none.txt"], "there is no text file none.txt."),
        (["nothing", *TEXT], "MODEL: there is no folder nothing, and a hub id has"),
    ],
)
def test_what_cannot_be_made_is_told_before_a_model_is_loaded(arguments, message, folder, monkeypatch, capsys):
    monkeypatch.setattr(ModelSpec, "load", lambda *_: pytest.fail("loaded"))
    output = [] if "--output" in arguments else ["--output", "rows.jsonl"]
    assert run(*arguments, *output) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert message in errors[-1] and errors[-1].startswith("rope-patch rows: ")
    assert not (folder / "rows.jsonl").exists()


def test_shares_are_named(folder, capsys):
    with pytest.raises(SystemExit):
        run("base", "--output", "rows.jsonl", "--shares", "book=1")
    assert "must be KIND=WEIGHT,... of text, chats, questions, own_texts" in capsys.readouterr().err
