"""The texts of the demo."""

from rope_patch.eval import read_texts
from trl_ext.demo import library


def test_the_longest_files_are_documents_and_what_is_there_stays(tmp_path, monkeypatch):
    files = []
    for name, text in (("a.py", "x = 'é'\n"), ("b.py", "y = 1\n"), ("c.py", "z")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        files.append(tmp_path / name)
    monkeypatch.setattr(library, "standard_library_files", lambda: files)
    monkeypatch.setattr(library, "_FILES", 2)
    written = tmp_path / "library.jsonl"
    library.write_library(written)
    assert list(read_texts([written])) == ["x = 'é'\n", "y = 1\n"]
    files.clear()
    library.write_library(written)
    assert len(list(read_texts([written]))) == 2
