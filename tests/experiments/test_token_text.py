"""Token files give back what was written."""

import json

import numpy as np
import pytest
import token_text

VOCABULARY = 50


@pytest.fixture
def tokens(tmp_path):
    """A folder of token files: documents of 700, 701, ... tokens in several parts."""
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(1, VOCABULARY, 700 + k), 0).astype(token_text.DTYPE) for k in range(6)]
    token_text.write_parts(tmp_path, "train", documents, 1500, 4000)
    token_text.write_parts(tmp_path, "val", documents[:3], 1500, None)
    (tmp_path / "tokens.json").write_text(json.dumps({"separator": 0, "vocabulary": VOCABULARY}))
    return tmp_path, documents


def test_token_files_give_back_their_documents(tokens):
    folder, documents = tokens
    assert len(list(folder.glob("train-*.u16.xz"))) == 2
    np.testing.assert_array_equal(token_text.read_stream(folder, "train"), np.concatenate(documents)[:4000])
    for ids, written in zip(token_text.read_documents(folder, "val"), documents, strict=False):
        np.testing.assert_array_equal(ids, written[:-1])
    assert [len(d) for d in token_text.read_documents(folder, "train")][-2:] == [
        704,
        4000 - 705 - 704 - 703 - 702 - 701,
    ]


def test_first_rows_are_of_documents_long_enough(tokens):
    folder, documents = tokens
    rows = token_text.first_rows(folder, "val", 701, 2)
    np.testing.assert_array_equal(rows, [documents[1][:701], documents[2][:701]])
    with pytest.raises(ValueError, match="2 documents of 701 tokens"):
        token_text.first_rows(folder, "val", 701, 3)
