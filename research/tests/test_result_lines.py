"""Slices of a list of runs."""

import pytest

import result_lines


def test_parts_share_all_runs():
    runs = list(range(7))
    assert sorted(sum((result_lines.share(runs, f"{k}/3") for k in range(3)), [])) == runs
    for wrong in ("3/3", "1", "-1/2", "a/b"):
        with pytest.raises(ValueError, match="--part must be K/N"):
            result_lines.share(runs, wrong)
