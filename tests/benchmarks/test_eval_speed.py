"""The benchmark of retrieval's speed says on a CPU what it says on a GPU, of a tiny shape."""

import json
import sys

import eval_speed
import pytest


@pytest.mark.slow
def test_every_line_is_there_and_both_ways_say_the_same(tmp_path, monkeypatch, capsys):
    out = tmp_path / "speed.jsonl"
    arguments = ["--shapes", "tiny", "--quick", "--length", "512", "--trials", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["eval_speed.py", *arguments])
    eval_speed.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["line"] for line in lines] == ["setting", "new", "new", "total", "old"]
    assert lines[-1]["replies_that_differ"] == 0 and lines[-1]["prompts"] == 4
    assert lines[3]["seconds"] == pytest.approx(lines[1]["seconds"] + lines[2]["seconds"])
    for line in lines[1:3]:
        assert 0 < line["read_seconds"] + line["decode_seconds"] <= line["seconds"]
    assert len(capsys.readouterr().out.splitlines()) == len(lines)
