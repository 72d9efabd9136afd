"""The benchmark of writing chats on a CPU: it writes the lines that it writes on a GPU, of a tiny model."""

import json
import sys

import pytest
import rows_speed


@pytest.mark.slow
def test_both_ways_are_timed(tmp_path, monkeypatch, capsys):
    out, models = tmp_path / "speed.jsonl", []
    by_generate = rows_speed.own_generate
    monkeypatch.setattr(rows_speed, "own_generate", lambda model: (models.append(model), by_generate(model))[1])
    monkeypatch.setattr(sys, "argv", ["rows_speed.py", "--quick", "--out", str(out)])
    rows_speed.main()
    setting, new, old = [json.loads(line) for line in out.read_text().splitlines()]
    assert (setting["line"], new["line"], old["line"]) == ("setting", "new", "old")
    for line in (new, old):
        assert line["chats"] == 8 and line["tokens"] > 500
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
    assert old["ratio"] == pytest.approx(new["tokens_per_second"] / old["tokens_per_second"])
    assert len(models) == 1 and "generate" not in vars(models[0])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_checkpoint_is_not_quick(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rows_speed.py", "--quick", "--model", "SmolLM2"])
    with pytest.raises(SystemExit):
        rows_speed.main()
    assert "leave out --model or --quick" in capsys.readouterr().err
