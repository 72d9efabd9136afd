"""The benchmark of several GPUs on CPUs: a tiny model, and ranks that communicate by gloo."""

import json
import sys
from argparse import Namespace

import pytest
import several_gpus

OWN_ROWS = [name for name, case in several_gpus.CASES.items() if not case.shared]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_every_case_with_rows_of_its_own_writes_a_line(tmp_path, monkeypatch, gpus):
    out = tmp_path / "lines.jsonl"
    arguments = ["several_gpus.py", "--shape", "tiny", "--layers", "1", "--steps", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--gpus", str(gpus), "--cases", *OWN_ROWS])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    several_gpus.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["case"] for line in lines] == OWN_ROWS
    for line in lines:
        case = several_gpus.CASES[line["case"]]
        assert line["tokens"] == gpus * case.rows * case.length // several_gpus.TINY
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert len(line["losses"]) == 2


def test_steps_that_read_other_rows_than_those_that_are_timed_fail():
    """As under Ulysses, which takes a step for each row that ranks have read at once."""
    trainer = object.__new__(several_gpus.RopeSFTTrainer)
    trainer.state = Namespace(log_history=[{"num_tokens": n} for n in (10, 20, 120)] + [{"train_loss": 1.0}])
    several_gpus.require_read(trainer, 100, unwatched=2)
    with pytest.raises(RuntimeError, match="100 tokens are timed and 110 were read"):
        several_gpus.require_read(trainer, 100, unwatched=1)


def test_a_case_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    out = tmp_path / "lines.jsonl"
    failing = lambda name, *_: [sys.executable, "-c", f"raise SystemExit('no {name}')"]  # noqa: E731
    monkeypatch.setattr(several_gpus, "command_of", failing)
    arguments = ["--out", str(out), "--gpus", "1", "--cases", "pose", "ring", "clm-lora"]
    monkeypatch.setattr(sys, "argv", ["several_gpus.py", *arguments])
    several_gpus.main()
    first, second = [json.loads(line) for line in out.read_text().splitlines()]  # one GPU shares no row
    assert "no pose" in first["error"]
    assert "no clm-lora" in second["error"]


def test_views_reach_as_far_in_shorter_rows():
    """Gaps grow with rows, and the window is rescaled to where they end."""
    fields = several_gpus.fields_of(several_gpus.CASES["pose"], length=128, window=256, n_steps=2, folder="")
    assert fields["view_args"] == {"target": 1024} and fields["rescale_args"] == {"factor": 4.0}


def test_rows_that_gpus_share_have_no_fixed_split():
    """Whose short first row would have to be half as long as the others."""
    own, shared = (
        several_gpus.fields_of(several_gpus.CASES[name], length=256, window=512, n_steps=2, folder="")
        for name in ("self-distill", "ring")
    )
    assert own["view_args"] == {"split": 128} and "view_args" not in shared
