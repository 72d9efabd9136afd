"""A damaged JSON file is told by its name, with what is wrong and what to do."""

import json

import pytest

from rope_patch.base.json_records import read_record

SHAPE = {"name": str, "steps": int | float | None, "run": {"papers": [str]}, "stages": [{"name": str}]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is no JSON: Expecting value"),
        ('{"name": "a', "is no JSON: Unterminated string"),
        ("[]", r"must hold an object, got \[\]"),
        ("{}", "must hold a text as name, got None"),
        ('{"name": 5}', "must hold a text as name, got 5"),
        ('{"name": "a", "steps": "2"}', "must hold a number as steps, got '2'"),
        ('{"name": "a", "run": null}', "must hold an object as run, got None"),
        ('{"name": "a", "run": {"papers": ["b", 1]}}', r"must hold a text as run.papers\[1\], got 1"),
        ('{"name": "a", "stages": [{}]}', r"must hold a text as stages\[0\].name, got None"),
    ],
)
def test_what_is_wrong_is_told_with_the_file(text, problem, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{file} {problem}.*Write it again"):
        read_record(file, "Write it again.", SHAPE)


def test_bytes_that_are_no_text_are_told(tmp_path):
    (tmp_path / "record.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="record.json is no JSON: 'utf-8' codec can't decode"):
        read_record(tmp_path / "record.json", "Write it again.")


def test_a_whole_one_is_read_with_entries_that_no_shape_names(tmp_path):
    values = {"name": "a", "steps": 2.5, "run": {"papers": []}, "stages": [{"name": "b", "more": None}], "other": [1]}
    (tmp_path / "record.json").write_text(json.dumps(values))
    assert read_record(tmp_path / "record.json", "Write it again.", SHAPE) == values
