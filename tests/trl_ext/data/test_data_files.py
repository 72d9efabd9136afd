"""Errors for files that `datasets` cannot read name the line."""

import lzma

import pytest
from datasets import load_dataset

from trl_ext.data.data_files import READ_ERRORS, unreadable

WHOLE = '{"text": "a", "meta": "b"}\n'


def told(kind, files, named=None):
    with pytest.raises(READ_ERRORS) as raised:
        load_dataset(kind, data_files=list(map(str, files)), split="train", cache_dir="cache")
    return str(unreadable([named or [str(file) for file in files]], raised.value))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.jsonl").write_text(WHOLE)
    return tmp_path


@pytest.mark.parametrize(("line", "reason"), [(r'{"text": "\ud83d"}', "surrogate pair"), ('{"text": "a', "JSON parse")])
def test_a_line_that_cannot_be_read_is_named(line, reason, folder):
    (folder / "bad.jsonl").write_text(f"{WHOLE}\n{WHOLE}{line}\n")
    found = told("json", ["whole.jsonl", "bad.jsonl"], {"train": ["whole.jsonl"], "test": "bad*"})
    assert found.startswith("the text in whole.jsonl, bad* cannot be read: JSON parse error")
    assert reason in found and found.endswith(", in line 4 of bad.jsonl.")
    (folder / "bad.jsonl.xz").write_bytes(lzma.compress((folder / "bad.jsonl").read_bytes()))
    assert told("json", ["bad.jsonl.xz"]).endswith(", in line 4 of bad.jsonl.xz.")
