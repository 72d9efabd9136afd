"""`rope-patch extend`: its flags reach `trl_ext.extend`, and mistakes are one line."""

import json

import pytest
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

import trl_ext.extension.extending as extending
from trl_ext import cli
from trl_ext.demo.settings import settings
from trl_ext.extension.options import ExtendOptions


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tiny(vocab_size=CHARACTERS, max_position_embeddings=800).save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    text = "It was a dark night. Who was there? " * 200  # of many documents one is measured on, beside no others
    (tmp_path / "books.jsonl").write_text("".join(json.dumps({"text": f"{k} {text}"}) + "\n" for k in range(20)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl_ext.extension.machine._SECONDS", 0.0)
    return tmp_path


def test_flags_reach_the_function(folder, monkeypatch):
    found = {}

    def extend(model, **given):
        found.update(model=model, **given)
        return "done"

    monkeypatch.setattr(extending, "extend", extend)
    arguments = ["extend", "base", "--to", "1600", "--data", "books.jsonl", "--output", "out", "--target", "vllm"]
    arguments += ["--target", "mlx", "--rows", "4", "--rescale", "yarn", "--rescale-args", '{"factor": 2}']
    assert cli.main([*arguments, "--shares", "text=1", "--no-gradient-checkpointing", "--lengths", "5", "6"]) == 0
    assert found["model"] == "base" and found["targets"] == ["vllm", "mlx"] and found["rescale_args"] == {"factor": 2}
    assert found["gradient_checkpointing"] is False and found["lengths"] == (5, 6) and found["shares"] == {"text": 1.0}
    assert found.keys() - {"dry_run"} == {field for field in ExtendOptions.__dataclass_fields__}, (
        "each field has a flag"
    )


def test_a_dry_run_prints_the_plan(folder, capsys):
    arguments = ["base", "--to", "1600", "--data", "books.jsonl", "--output", "out", "--short", "0", "--facts", "2"]
    arguments += ["--prompts", "2"]  # ten need longer texts of this tokenizer
    assert cli.main(["extend", *arguments, "--lengths", "700", "--device", "cpu", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "How the context window becomes 1,600 positions, and why" in printed and not (folder / "out").exists()
    assert max(map(len, printed.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["base", "--to", "1600", "--data", "none.jsonl"], "there is no text file none.jsonl"),
        (["base", "--to", "1600", "--data", "base"], "base/config.json cannot be read as text: it ends with .json"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, folder, capsys):
    assert cli.main(["extend", *arguments, "--output", "out", "--device", "cpu"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert message in errors[-1] and errors[-1].startswith("rope-patch extend: ") and not (folder / "out").exists()


@pytest.mark.parametrize("command", ["extend", "demo"])
def test_help_says_the_true_defaults(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    options = ExtendOptions(model="m", to=1, data=("a",), output="o")
    for name in ("seed", "facts", "rows_per_step", "lora_rank"):
        flag = f"--{name.replace('_', '-')}"
        said = printed.rpartition(f" {flag} ")[2].partition("default: ")[2]
        assert said.startswith(f"{getattr(options, name)}"), flag
    assert "default: None" not in printed
    if command == "demo":
        on_cpu, on_gpu = (settings(device, {})["rows_per_step"] for device in ("cpu", "cuda"))
        assert f"rows in an optimizer step; default: {on_gpu}, on a CPU {on_cpu} " in printed
