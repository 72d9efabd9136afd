"""The benchmark of masks runs on a CPU too, on tiny layers."""

import json
import sys

import pytest
import row_masks


@pytest.mark.slow
def test_each_case_is_timed_with_masks_and_without(tmp_path, monkeypatch):
    out = tmp_path / "times.jsonl"
    arguments = ["row_masks.py", "--quick", "--tokens", "600", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    row_masks.main()
    _, *runs = map(json.loads, out.read_text().splitlines())
    assert [(run["shape"], run["document"]) for run in runs] == list(map(tuple, row_masks.CASES))
    for run in runs:
        assert run["ratio"] == pytest.approx(run["masks"]["seconds"] / run["none"]["seconds"], rel=1e-3)
