"""The benchmark of noise on attention runs on a CPU too, where it times nothing."""

import json
import sys

import noise_attention
import pytest


@pytest.mark.usefixtures("flex_runs_eagerly")
def test_each_case_runs(tmp_path, monkeypatch):
    out = tmp_path / "times.jsonl"
    monkeypatch.setattr(sys, "argv", ["noise_attention.py", "--quick", "--out", str(out)])
    noise_attention.main()
    _, *runs = map(json.loads, out.read_text().splitlines())
    assert [run["case"] for run in runs] == list(noise_attention.CASES)
