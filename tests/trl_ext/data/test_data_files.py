"""What `datasets` cannot read is told with its line or column."""

import lzma
import re

import pyarrow as pa
import pyarrow.parquet as pq
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


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_column_that_is_empty_in_the_first_file_is_named(kind, folder):
    (folder / "empty.jsonl").write_text('{"text": "a", "meta": null}\n')
    files = ["empty.jsonl", "whole.jsonl"]
    if kind == "parquet":
        files = ["empty.parquet", "whole.parquet"]
        for file, value in zip(files, (None, "b"), strict=True):
            pq.write_table(pa.table({"text": ["a"], "meta": [value]}), file)
    found = told(kind, files)
    assert re.search(rf"string to null: the column meta has no value in {files[0]}, .* Name a file first in", found)
    assert len(load_dataset(kind, data_files=files[::-1], split="train", cache_dir="cache")) == 2, "which is the remedy"
