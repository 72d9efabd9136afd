"""The benchmark of losses on maps on a CPU: it writes the lines that it writes on a GPU, of a tiny shape."""

import json
import sys

import pytest
import relation_kl


def test_every_operator_is_exact_and_timed_beside_a_peer(tmp_path, monkeypatch, capsys):
    out = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["relation_kl.py", "--quick", "--out", str(out)])
    relation_kl.main()
    facts = json.loads(out.read_text())
    assert list(facts["error_against_float64"]) == list(relation_kl.OPERATORS)
    bound = 2e-2 if facts["dtype"] == "bfloat16" else 1e-4
    assert all(error < bound for errors in facts["error_against_float64"].values() for error in errors.values())
    assert [row["operator"] for row in facts["rows"]] == list(relation_kl.OPERATORS)
    for row in facts["rows"]:
        ours = row[row["operator"]]["both_ms"]
        assert row["ratio"] and row["ratio"] == {
            peer: pytest.approx(ours / row[peer]["both_ms"]) for peer in row["ratio"]
        }
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(facts["rows"])
