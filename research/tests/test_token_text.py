"""Token files give back what was written."""

import json

import numpy as np
import pytest

import token_text


@pytest.fixture(params=[2**16, 2**16 + 1, 262144])
def tokens(tmp_path, request):
    """A folder of token files: documents of 700, 701, ... tokens in several parts."""
    rng, vocabulary = np.random.default_rng(0), request.param
    dtype = token_text.DTYPES[token_text.kind_of(vocabulary)]
    documents = [np.append(rng.integers(1, vocabulary, 700 + k), 0).astype(dtype) for k in range(6)]
    documents[0][0] = vocabulary - 1
    token_text.write_parts(tmp_path, "train", documents, 1500, 4000)
    token_text.write_parts(tmp_path, "val", documents[:3], 1500, None)
    (tmp_path / "tokens.json").write_text(json.dumps({"separator": 0, "vocabulary": vocabulary}))
    return tmp_path, documents


def test_token_files_give_back_their_documents(tokens):
    folder, documents = tokens
    kind = "u32" if token_text.read_facts(folder)["vocabulary"] > 65536 else "u16"
    assert len(list(folder.glob(f"train-*.{kind}.xz"))) == len(list(folder.glob("train-*"))) == 2
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
