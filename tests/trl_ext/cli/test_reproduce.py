"""`rope-patch reproduce`: commands run once each, in order, and a table shows the paper's figures beside theirs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.tiny import tiny
from support.training import tokenizer

from rope_patch.prompts.text import standard_library_files
from trl_ext import cli
from trl_ext.demo.library import write_held_out, write_library

# a "measure" that writes a report as `rope-patch eval` does, and counts its calls
MEASURE = """
import json, pathlib, sys
at = pathlib.Path(sys.argv[1])
(at / "report").mkdir(parents=True, exist_ok=True)
summary = [{"figure": "keys at 64", "values": {"a": 0.25, "b": 0.5, "c": None}}]
(at / "report" / "results.json").write_text(json.dumps({"summary": summary}))
with (at / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[2:]) + chr(10))
if "fail" in sys.argv and not (at / "repaired").exists():
    sys.exit(3)
"""


def paper(at, commands, figures=()):
    (at / "toy").mkdir()
    (at / "toy" / "measure.py").write_text(MEASURE)
    size = {"commands": commands, "figures": list(figures)}
    content = {"paper": "A paper", "small": size, "full": {**size, "commands": commands[:1]}}
    (at / "toy" / "reproduce.yaml").write_text(yaml.safe_dump(content))
    return str(at / "toy")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_figures_of_the_paper_stand_beside_those_that_came(here, capsys):
    claims = [
        {"claim": "b finds more", "paper": "1 < 2", "figure": "keys at 64", "models": ["a", "b"]},
        {"claim": "a finds more", "paper": "2 < 1", "figure": "keys at 64", "models": ["b", "a"]},
        {"claim": "c is not known", "paper": "-", "figure": "keys at 64", "models": ["a", "c"]},
        {"claim": "nor is this", "paper": "-", "figure": "other", "models": ["a"]},
    ]
    folder = paper(here, ["python $folder/measure.py $output"], claims)
    assert cli.main(["reproduce", folder, "--output", "out put"]) == 0
    made = Path("out put", "figures.md").read_text()
    assert made in capsys.readouterr().out
    assert [line.split(" | ")[2] for line in made.splitlines()[4:8]] == [
        "0.250 < 0.500",
        "0.500, 0.250",
        "0.250, -",
        "-",
    ]


def test_what_was_finished_is_not_run_again(here, capfd):
    commands = [f"python $folder/measure.py $output {word}" for word in ("first", "fail", "last")]
    folder = paper(here, commands)
    assert cli.main(["reproduce", folder, "--output", "out"]) == 3
    assert "The same command goes on from there, in out." in capfd.readouterr().err
    Path("out", "repaired").touch()
    assert cli.main(["reproduce", folder, "--output", "out"]) == 0
    assert Path("out", "calls").read_text().split() == ["first", "fail", "fail", "last"]
    seconds = json.loads(Path("out", "done.json").read_text())
    assert [command.split()[-1] for command in seconds] == ["first", "fail", "last"]
    assert all(0 <= s < 60 for s in seconds.values())
    assert f"{list(seconds.values())[-1]} seconds" in capfd.readouterr().out.splitlines()


def test_a_command_that_is_stopped_ends_by_itself_and_is_run_again(here):
    """Ctrl-C goes to both; the command takes longer to save than the 0.25 seconds that `subprocess` gives one."""
    folder = paper(here, ["python $folder/slow.py"])
    Path(folder, "slow.py").write_text(
        "import pathlib, time\n"
        "try:\n    pathlib.Path('began').touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1); pathlib.Path('saved').touch(); raise\n"
    )
    words = [sys.executable, "-m", "trl_ext", "reproduce", folder, "--output", "out"]

    def interruptible():  # a shell's background jobs, and all below them, ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        words, start_new_session=True, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    )
    until = time.monotonic() + 60
    while not Path("began").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert Path("saved").exists() and process.returncode != 0
    assert "The same command goes on from there" in said and not Path("out", "done.json").exists()


def test_a_dry_run_prints_the_commands_and_runs_none(here, capsys):
    folder = paper(here, ["python $folder/measure.py $output", "rope-patch eval --model a=$model --text $held_out"])
    assert cli.main(["reproduce", folder, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"python {folder}/measure.py toy",
        "rope-patch eval --model a=toy/SmolLM2-135M-Instruct --text toy/held-out.jsonl",
    ]
    assert cli.main(["reproduce", folder, "--full", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"python {folder}/measure.py toy-full\n"
    assert [file.name for file in here.iterdir()] == ["toy"]


def test_a_name_that_is_no_paper_says_which_there_are(here, capsys):
    assert cli.main(["reproduce", "rpds"]) == 2
    assert "which comes with the sources: git clone" in capsys.readouterr().err
    shutil.copytree(paper(here, []), "examples/papers/toy")
    assert cli.main(["reproduce", "rpds"]) == 2
    assert "examples/papers has toy." in capsys.readouterr().err
    assert cli.main(["reproduce", "toy", "--dry-run"]) == 0


def test_texts_to_measure_on_are_none_of_those_to_train_on(tmp_path):
    write_library(tmp_path / "train.jsonl")
    write_held_out(tmp_path / "held-out.jsonl")
    train, held_out = (
        [json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held-out")
    )
    assert len(train) == len(held_out) == 200
    sources = [file.read_text(encoding="utf-8", errors="replace") for file in standard_library_files()[:400]]
    assert train + held_out == sources


@pytest.mark.slow
def test_commands_of_this_package_train_and_measure(here, capfd):
    tiny(max_position_embeddings=96).save_pretrained("start")
    tokenizer().save_pretrained("start")
    rows = [{"text": " ".join(f"w{3 + (i * j) % 97}" for j in range(200))} for i in range(1, 9)]
    Path("text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    commands = [
        "rope-patch train $folder/small.yaml --model start --data text.jsonl --output-dir $output/trained",
        "rope-patch eval --model start=start --model trained=$output/trained --cliff --length 160 --rows 1 "
        "--text text.jsonl --device cpu --report $output/report",
    ]
    figure = "rise of the loss beyond the window"
    folder = paper(here, commands, [{"claim": "-", "paper": "-", "figure": figure, "models": ["start", "trained"]}])
    recipe = {"max_steps": 1, "max_length": 32, "use_cpu": True, "bf16": False, "report_to": "none"}
    Path(folder, "small.yaml").write_text(yaml.safe_dump(recipe))
    assert cli.main(["reproduce", folder, "--output", "out"]) == 0
    (row,) = (line for line in capfd.readouterr().out.splitlines() if f"| {figure} |" in line)
    (values,) = (
        row["values"]
        for row in json.loads(Path("out/report/results.json").read_text())["summary"]
        if row["figure"] == figure
    )
    assert all(f"{values[label]:.3f}" in row.split(" | ")[2] for label in ("start", "trained"))
