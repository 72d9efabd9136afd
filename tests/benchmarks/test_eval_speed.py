"""The benchmark of retrieval's speed on a CPU: it writes the lines that it writes on a GPU, of a tiny shape."""

import json
import sys

import eval_speed
import pytest


@pytest.mark.slow
def test_every_line_is_there_and_both_ways_say_the_same(tmp_path, monkeypatch, capsys):
    out = tmp_path / "speed.jsonl"
    arguments = ["--shapes", "tiny", "--quick", "--by-kind", "--length", "512", "--trials", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["eval_speed.py", *arguments])
    eval_speed.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["line"] for line in lines] == ["setting", "together", "total", "new", "new", "old"]
    assert lines[-1]["replies_that_differ"] == 0 and lines[-1]["prompts"] == 4
    assert (
        lines[2]["seconds"] == lines[1]["seconds"] and lines[1]["prompts"] == lines[3]["prompts"] + lines[4]["prompts"]
    )
    for line in (lines[1], *lines[3:5]):
        assert 0 < line["read_seconds"] + line["decode_seconds"] <= line["seconds"]
    assert len(capsys.readouterr().out.splitlines()) == len(lines)
