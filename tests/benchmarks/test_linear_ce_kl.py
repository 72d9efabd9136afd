"""The benchmark of losses of the vocabulary on a CPU: it writes the lines that it writes on a GPU, of a tiny shape."""

import json
import sys

import linear_ce_kl
import pytest


def test_every_operator_is_exact_and_timed_beside_a_peer(tmp_path, monkeypatch, capsys):
    out = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["linear_ce_kl.py", "--quick", "--out", str(out)])
    linear_ce_kl.main()
    facts = json.loads(out.read_text())
    bound = 2e-2 if facts["dtype"] == "bfloat16" else 1e-4
    for operator in linear_ce_kl.OPERATORS:
        ours = facts["errors"][operator]["ours"]
        assert ours and all(error < bound for error in ours.values())
    assert {row["operator"] for row in facts["rows"]} == set(linear_ce_kl.OPERATORS)
    for row in facts["rows"]:
        assert "trl" in row["ratio"]
        assert row["ratio"] == {peer: pytest.approx(row["ours"]["ms"] / row[peer]["ms"]) for peer in row["ratio"]}
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(facts["rows"])
