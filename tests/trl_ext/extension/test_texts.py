"""What is trained on is not measured on, and where documents come from."""

import json
from types import SimpleNamespace

import pytest
from datasets import Dataset
from support.characters import character_tokenizer

from trl_ext.extension import texts
from trl_ext.extension.options import ExtendOptions

FACTS = SimpleNamespace(tokenizer=character_tokenizer(), is_chat=False)


def read(tmp_path, documents, to=500, n_rows=1, **more):
    for k, document in enumerate(documents):
        (tmp_path / f"{k}.txt").write_text(document)
    files = tuple(str(tmp_path / f"{k}.txt") for k in range(len(documents)))
    options = ExtendOptions(model="m", to=to, data=files, output="out", **more)
    return texts.read(FACTS, options, row_length=100, measured_length=to, n_rows=n_rows)


def test_every_tenth_document_is_held_out(tmp_path):
    documents = [f"{k} " * 300 for k in range(20)]
    found = read(tmp_path, documents)
    assert set(found.held_out) == {documents[0], documents[10]} and len(found.train) == 18
    assert not set(found.held_out) & set(found.train) and "every 10th document" in found.source


def test_beside_short_texts_pythons_sources_are_measured_on_unless_they_are_trained_on(tmp_path, monkeypatch):
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file, word in zip(files, ("word ", "other "), strict=True):
        file.write_text(word * 300)
    monkeypatch.setattr(texts, "standard_library_files", lambda: files)
    found = read(tmp_path, ["word " * 300])
    assert found.train == ["word " * 300] and found.held_out == ["other " * 300]
    assert "Python's standard library" in found.source
    with pytest.raises(ValueError, match="--held-out is too short for 1 rows"):
        read(tmp_path, ["word " * 300, "other " * 300], to=1700)


def test_the_end_of_the_only_document_is_held_out_where_it_is_long_enough(tmp_path):
    document = " ".join(map(str, range(4000)))
    found = read(tmp_path, [document])
    assert found.train[0] + found.held_out[0] == document and 9 < len(document) / len(found.held_out[0]) < 11
    assert found.source == "the last tenth of --data, which is not trained on"


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(("n_documents", "n_parts"), [(1, 4), (12, 4), (31, 1)])
def test_few_long_documents_are_cut_into_parts_for_several_rows(n_documents, n_parts, is_named, tmp_path):
    """Four rows are read, and of a text one row is taken."""
    documents = [f"{k} " * 12000 for k in range(100, 100 + n_documents)]
    if is_named:
        held = documents[::10] if n_documents > 1 else ["other " * 800]
        files = [tmp_path / f"held{k}.txt" for k in range(len(held))]
        for file, text in zip(files, held, strict=True):
            file.write_text(text)
        found = read(tmp_path, ["word " * 300], n_rows=4, held_out=tuple(map(str, files)))
    else:
        found = read(tmp_path, documents, n_rows=4)
        held = documents[::10] if n_documents > 1 else [documents[0][-4800:]]
    assert len(found.held_out) == max(n_parts, 4) and sorted("".join(found.held_out)) == sorted("".join(held))
    assert found.source.endswith(f", cut into {n_parts} parts") == (n_parts > 1) and "Python" not in found.source


@pytest.mark.parametrize("is_named", [False, True])
def test_a_long_document_beside_short_ones_is_cut_for_all_rows(is_named, tmp_path):
    long, short, trained = "a long one " * 250, "short " * 5, "word " * 300
    if is_named:
        for name, text in (("long", long), ("short", short)):
            (tmp_path / f"{name}.txt").write_text(text)
        held_out = (str(tmp_path / "short.txt"), str(tmp_path / "long.txt"))
        found = read(tmp_path, [trained], n_rows=4, held_out=held_out)
    else:  # the first and the eleventh are measured on
        found = read(tmp_path, [long, *[f"{k} {trained}" for k in range(9)], short], n_rows=4)
    assert found.source.endswith(", cut into 8 parts") and "Python" not in found.source
    assert sorted("".join(found.held_out)) == sorted(long + short)
    assert [len(text) >= 500 for text in found.held_out] == [True] * 4 + [False] * 4


def test_held_out_files_are_taken_as_they_are(tmp_path):
    (tmp_path / "held.txt").write_text("other " * 300)
    found = read(tmp_path, ["word " * 300], held_out=(str(tmp_path / "held.txt"),))
    assert found.held_out == ["other " * 300] and len(found.train) == 1
    with pytest.raises(ValueError, match="--held-out is too short for 1 rows of 5,000 tokens"):
        read(tmp_path, ["word " * 300], to=5000, held_out=(str(tmp_path / "held.txt"),))


def test_copies_of_what_is_measured_on_are_not_trained_on(tmp_path):
    documents = [f"{k} " * 300 for k in range(11)]
    found = read(tmp_path, [*documents, documents[0], documents[1], documents[10]])
    assert set(found.held_out) == {documents[0], documents[10]}
    assert found.train == [*documents[1:10], documents[1]]
    assert found.source == "every 10th document of --data with its 2 copies, which is not trained on"


def test_what_is_measured_on_must_not_be_trained_on(tmp_path):
    (tmp_path / "held.txt").write_text("word " * 300)
    with pytest.raises(ValueError, match="--held-out must have other documents than --data: 1 are in both.*'word word"):
        read(tmp_path, ["other " * 300, "word " * 300], held_out=(str(tmp_path / "held.txt"),))


CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]


@pytest.fixture
def chats():
    """Facts of a model whose chat template begins with the token that begins every text."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.bos_token = "<s>"
    return SimpleNamespace(tokenizer=tokenizer, is_chat=True)


def test_folders_files_and_chats_are_read(tmp_path, chats):
    (tmp_path / "books/old").mkdir(parents=True)
    (tmp_path / "books/old/a.txt").write_text("one")
    (tmp_path / "books/b.jsonl").write_text(f"{json.dumps({'text': 'two'})}\n{json.dumps({'messages': CHAT})}\n")
    (tmp_path / "books/.hidden").write_text("three")
    (tmp_path / "c.md").write_text("four")
    found = texts.documents(chats, [str(tmp_path / "books"), str(tmp_path / "c.md")])
    assert found == ["two", "user: Who?\nassistant: Me.\n", "one", "four"], "a text begins with <s> as others do"
    with pytest.raises(ValueError, match="line 2 of .*b.jsonl has no field `text`; it has messages"):
        texts.documents(FACTS, [str(tmp_path / "books")])
    before = texts.contents([str(tmp_path / "books")])
    (tmp_path / "books/old/a.txt").write_text("five")
    assert texts.contents([str(tmp_path / "books")]) != before


def test_a_data_set_on_the_hub_is_read(tmp_path, chats, monkeypatch):
    rows = {"one/books": [{"text": "two"}, {"text": "three"}], "one/chats": [{"messages": CHAT}]}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(texts, "load_dataset", lambda name, split: Dataset.from_list(rows[name]))
    assert texts.documents(chats, list(rows)) == ["two", "three", "user: Who?\nassistant: Me.\n"]
    first, second = texts.contents(["one/books"]), texts.contents(["one/chats"])
    assert first == texts.contents(["one/books"]) != second
    for path in ("books/all.jsonl", "books/all.txt", "books.jsonl", "/one/books", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="there is no text file"):
            texts.documents(chats, [path])
